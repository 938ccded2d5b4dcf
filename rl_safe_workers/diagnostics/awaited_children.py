"""Looks at the processes that a rank has started and waits for: a data loader's workers, a pool's, a sandbox.

py-spy looks at them, if it is installed and has permission. Otherwise this module signals forked children. A forked
child inherits the rank's handler of `STACK_SIGNAL`, so it writes its stacks to the rank's file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rl_safe_workers.control.deadline import Deadline, attempt
from rl_safe_workers.diagnostics.proc_facts import GONE, RUNS, descendants_of, look_at
from rl_safe_workers.diagnostics.stacks import Stack, py_spy
from rl_safe_workers.foreign_files import printable
from rl_safe_workers.frames import Frame, frames_inside

_WAITS = (
    *("/multiprocessing/connection.py", "/multiprocessing/queues.py", "/multiprocessing/popen_fork.py"),
    *("multiprocess/connection.py", "multiprocess/queues.py", "multiprocess/popen_fork.py"),
    *("/concurrent/futures/_base.py", "/subprocess.py", "torch/utils/data/dataloader.py"),
)
"""Ends of the paths of files in which a process waits for a child. ``multiprocess`` is the fork that datasets uses."""
_BEGINS = ("multiprocessing/process.py", "multiprocess/process.py")
"""Ends of the paths of files in which a child begins. The frames outside of it are its parent's, copied by a fork."""
_HELPERS = ("resource_tracker", "forkserver", "SyncManager", "managers.py")
_COMMAND_CHARACTERS = 80
_MOST = 8
"""Most children that are looked at, the nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process that a rank has started, and what it does.

    Example: ``Child(pid=4711, text="Process 4711: ...", said="is at rows.py:12 (from_cache)")``
    """

    pid: int
    text: str
    """The stacks of its threads. The text is empty if nobody could read them."""
    said: str
    """Its action, as the end of a sentence; empty if it is in no line of the user's code, or nobody can tell."""
    awaits_message: bool
    """True if it waits for what another process sends, such as work."""

    @property
    def as_awaited(self) -> str:
        """The end of a sentence about the process that waits for this child; empty if its action is not known."""
        return f"waits for its process {self.pid}, which {self.said}" if self.said else ""


def waits_for_a_child(frames: Sequence[Frame]) -> bool:
    """Returns True if frames, innermost first, may wait for a child process or for a message from one."""
    return any(frame.file.endswith(_WAITS) for frame in frames_inside(frames))


def children_of(pid: int, deadline: Deadline, *, ask: Callable[[int], str]) -> list[Child]:
    """Returns the children of a process, those that do something first. Blocks until the deadline at most.

    Args:
        pid: The process.
        deadline: Longest wait. A child that cannot be looked at by then is left out.
        ask: Makes a child write its stacks and returns them; empty if the child writes none.
    """
    pids: list[int] = []
    attempt("looking for children", lambda: pids.extend(descendants_of(pid)[:_MOST]), timeout_s=_left_s(deadline))
    found: list[Child] = []
    one_by_one = threading.Lock()  # they write to one file

    def ask_alone(one: int) -> str:
        with one_by_one:
            return ask(one)

    def look(one: int) -> None:
        what = f"looking at process {one}"
        attempt(what, lambda: found.extend(_look(one, ask_alone, deadline)), timeout_s=_left_s(deadline))

    with ThreadPoolExecutor(max_workers=_MOST) as pool:
        list(pool.map(look, pids))
    return sorted(found, key=lambda child: (not child.said, child.awaits_message, child.pid))


def _left_s(deadline: Deadline) -> float:
    return deadline.remaining().total_seconds()


def _look(pid: int, ask: Callable[[int], str], deadline: Deadline) -> list[Child]:
    facts = look_at(pid)
    if facts.state in GONE or any(helper in facts.command for helper in _HELPERS):
        return []
    text = py_spy(pid, timeout_s=_left_s(deadline.share(0.5)))
    if not text and facts.state != RUNS:  # the signal may end a process that runs Python
        text = ask(pid)
    frames = list(Stack.parse(text).frames) if text else []
    begins = [number for number, frame in enumerate(frames) if frame.file.endswith(_BEGINS)]
    frames = frames[: begins[0]] if begins else frames
    place = next((frame for frame in frames if frame.is_telling), None)
    wait = facts.describe_wait()
    # Without a line of the user's, a wait for a pipe tells nothing: an idle worker waits like that, too.
    said = wait if not frames and not facts.file.startswith("pipe:") else ""
    if facts.waits_to_write:
        said = f"runs {printable(facts.command[:_COMMAND_CHARACTERS])}, and {wait}"
    if place is not None:
        said = f"is at {place}" + (f": {wait}" if wait else "")
    return [Child(pid=pid, text=text, said=said, awaits_message=waits_for_a_child(frames))]
