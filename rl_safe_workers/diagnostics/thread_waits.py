"""Finds what a thread waits for within its process: another thread, a debugger's prompt, its input or a file lock.

The frames and the thread's system call show it. A look at the system call may block if the process hangs in the kernel.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rl_safe_workers.control.deadline import Deadline, attempt
from rl_safe_workers.diagnostics.awaited_children import children_of, waits_for_a_child
from rl_safe_workers.diagnostics.proc_facts import ProcessFacts, look_at
from rl_safe_workers.diagnostics.stacks import Stack
from rl_safe_workers.frames import Frame, frames_inside, frames_of_thread, telling_frame

_DEBUGGERS = ("/pdb.py", "/bdb.py", "/cmd.py")
"""Ends of the paths of files of the standard library in which a debugger reads a command."""
_OF_THREADS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py", "/multiprocessing/pool.py")
"""Ends of the paths of files in which a thread waits for another one."""
_FOR_A_LOCK = "futex"
"""The system call in which a thread waits for a lock."""
_FOR_A_FILE = ("flock", "fcntl")
_LOOK_S = 3.0
"""Longest wait, in seconds, for a look at a thread of this process, and for a look at its children."""
_MOST = 3
"""Most lines of other threads that a message names."""


def where_is(thread: threading.Thread) -> str:
    """Returns where a thread of this process is, e.g. ``"it is at rows.py:12 (read)"``; empty if it has ended."""
    frames = frames_of_thread(thread)
    if (place := telling_frame(frames)) is None:
        return ""
    waits: list[str] = []

    def look() -> None:
        waits.append(wait_for_input(frames, look_at(os.getpid(), thread.native_id)))

    attempt(f"looking at the thread {thread.name}", look, timeout_s=_LOOK_S)
    if waits_for_a_child(frames):
        waits += [one.as_awaited for one in children_of(os.getpid(), Deadline.after(_LOOK_S), ask=lambda _: "")[:1]]
    return ", and ".join([f"it is at {place}", *filter(None, waits)])


def wait_of_thread(stack: Stack, pid: int) -> list[str]:
    """Returns the things that a stack's thread waits for, each as the end of a sentence; empty if unknown."""
    facts = look_at(pid, stack.native_id)
    if wait := wait_for_input(stack.frames, facts):
        return [wait]
    if not _waits_for_a_thread(stack.frames, facts):
        return []
    places: dict[Frame, list[str]] = {}
    for one in stack.others:
        if one.place is not None and _waits_for_a_thread(one.frames, look_at(pid, one.native_id)):
            places.setdefault(one.place, []).append(one.name)
    return [_threads_at(place, names) for place, names in list(places.items())[:_MOST]]


def wait_for_input(frames: Sequence[Frame], facts: ProcessFacts) -> str:
    """Returns the debugger, the input or the file lock that a thread waits for, as the end of a sentence.

    Args:
        frames: The thread's frames, innermost first.
        facts: The operating system's facts about the thread.
    """
    if any(frame.file.endswith(_DEBUGGERS) for frame in frames_inside(frames)):
        return "waits for input in a debugger"
    if facts.system_call == "read" and facts.file and facts.file == _standard_input(facts.pid):
        return "waits for its standard input"
    return facts.describe_wait() if facts.system_call in _FOR_A_FILE else ""


def _standard_input(pid: int) -> str:
    with suppress(OSError):
        return str(Path(f"/proc/{pid}/fd/0").readlink())
    return ""


def _waits_for_a_thread(frames: Sequence[Frame], facts: ProcessFacts) -> bool:
    inside = frames_inside(frames)
    # Without inner frames, the line itself may acquire a lock, in C.
    return any(one.file.endswith(_OF_THREADS) for one in inside) or (not inside and facts.system_call == _FOR_A_LOCK)


def _threads_at(place: Frame, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"its thread{f' {names[0]}' if names[0] else ''} is at {place}"
    return f"{len(names)} of its threads are at {place}"
