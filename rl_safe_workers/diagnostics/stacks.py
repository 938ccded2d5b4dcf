"""Reads the stacks that faulthandler or py-spy have written, and finds from them where a process is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self

from rl_safe_workers.frames import Frame, collective_of, frames_of_threads, is_installed, relative, telling_frame

_THREAD = re.compile(r"(?:Current thread|Thread) (?:0x[0-9a-f]+ ?)?(?P<number>\d+)?")
_NAME = re.compile(r" \[(?P<ours>.*)\] \(most recent call first\):$|: \"(?P<py_spy>.*)\"$")
_FRAMES = (
    re.compile(r'^ {2}File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$'),  # faulthandler
    re.compile(r"^ {4}(?P<function>\S.*) \((?P<file>.+):(?P<line>\d+)\)$"),  # py-spy
)
_CONTROL = ("rl_safe_workers/control/plane.py", "rl_safe_workers/control/board.py")


class CallFrame(NamedTuple):
    """The function in which the processes of a host run the calls that they get.

    Example: ``CallFrame("rl_safe_workers/driver/cluster/actors.py", "call")``
    """

    file: str
    """The end of the path of the function's file."""
    function: str
    other: CallFrame | None = None
    """A second such function, because a host may run calls on several threads."""

    def is_in(self, frames: Sequence[Frame]) -> bool:
        """Returns True if one of the frames is in this function or in ``other``."""
        return any(
            frame.function.rpartition(".")[2] == self.function and frame.file.endswith(self.file) for frame in frames
        ) or (self.other is not None and self.other.is_in(frames))


@dataclass(slots=True, kw_only=True)
class ThreadStack:
    """A thread of a process.

    Example: ``ThreadStack(name="prefetch", native_id=4711, frames=[Frame(...)])``
    """

    name: str = ""
    """Empty if nobody knows it."""
    native_id: int | None = None
    """The kernel's id of it; None if nobody knows it."""
    frames: list[Frame] = field(default_factory=list)
    """Innermost first."""
    place: Frame | None = None
    """The innermost line of the user's own code; None if the thread has no such line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The stack of the thread that runs the host's call, or of the main thread if none does."""

    frames: Sequence[Frame]
    """Innermost first."""
    is_in_a_call: bool
    """False if the process waits for its host to call it."""
    op: str | None
    """The torch collective that a thread of the process is in; None if no thread is in one."""
    native_id: int | None = None
    """The kernel's id of the thread; None if nobody knows it."""
    others: Sequence[ThreadStack] = ()
    """The other threads that are at a line of the user's."""

    @classmethod
    def parse(cls, text: str, call_frame: CallFrame | None = None) -> Self:
        """Reads the output of faulthandler or py-spy.

        Args:
            text: The stacks of all threads of a process.
            call_frame: Where the host's calls run; None: the main thread counts, as in a script.
        """
        threads = [ThreadStack()]
        main = -1  # faulthandler writes the main thread last; py-spy gives the threads' names
        for line in text.splitlines():
            if head := _THREAD.match(line):
                main = len(threads) if '"MainThread"' in line else main
                name = _NAME.search(line)
                native_id = None if head["number"] is None else int(head["number"])
                threads.append(ThreadStack(name=(name and (name["ours"] or name["py_spy"])) or "", native_id=native_id))
            for found in filter(None, (pattern.match(line) for pattern in _FRAMES)):
                frame = Frame(file=relative(found["file"]), line=int(found["line"]), function=found["function"])
                threads[-1].frames.append(frame)
                if threads[-1].place is None and frame.is_users and not is_installed(found["file"]):
                    threads[-1].place = frame
        stack = cls._of([one.frames for one in threads], threads[main].frames, call_frame)
        own = next(one for one in threads if one.frames is stack.frames)
        others = [one for one in threads if one is not own and one.place is not None]
        return replace(stack, native_id=own.native_id, others=others)

    @classmethod
    def here(cls, call_frame: CallFrame | None = None) -> Self:
        """Looks at the threads of this process.

        Args:
            call_frame: As for `parse`.
        """
        threads = [[replace(one, file=relative(one.file)) for one in frames] for frames in frames_of_threads().values()]
        return cls._of(threads, threads[-1], call_frame)

    @classmethod
    def _of(cls, threads: Sequence[Sequence[Frame]], main: Sequence[Frame], call_frame: CallFrame | None) -> Self:
        calls = [main] if call_frame is None else [one for one in threads if call_frame.is_in(one)]
        frames = calls[0] if calls else main
        ops = [op for thread in (frames, *threads) if (op := collective_of(thread)) is not None]
        return cls(frames=frames, is_in_a_call=bool(calls), op=ops[0] if ops else None)

    @property
    def place(self) -> Frame | None:
        """The innermost frame that tells where the process is; the innermost of all if none does."""
        return telling_frame(self.frames)

    @property
    def waits_for_others(self) -> bool:
        """True if the call waits for other ranks: in our control plane, or in a collective of torch."""
        return self.is_in_a_call and (
            any(frame.file.endswith(_CONTROL) for frame in self.frames) or collective_of(self.frames) is not None
        )


def is_cut_off(text: str) -> bool:
    """Returns True if faulthandler left threads out. It writes at most 100, and the main thread last."""
    return text.rstrip().endswith("\n...")


def py_spy(pid: int, *, timeout_s: float) -> str:
    """Returns py-spy's stacks of a process; empty if py-spy is not installed or has no permission."""
    # Without --nonblocking, py-spy stops the process and then continues it. It must not continue a stopped process.
    return dump(pid, "--nonblocking", timeout_s=timeout_s).text


class Dump(NamedTuple):
    """The output of py-spy, or the reason why there is none."""

    text: str
    complaint: str
    """Empty if there is output."""


def dump(pid: int, *options: str, timeout_s: float) -> Dump:
    """Runs ``py-spy dump`` on a process. Blocks.

    Args:
        pid: The process.
        options: Further options, such as ``--native``, for which py-spy stops the process for a moment.
        timeout_s: Longest wait, in seconds.
    """
    command = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if command is None:
        return Dump("", "py-spy is not installed")
    try:
        result = subprocess.run(
            [command, "dump", "--full-filenames", *options, "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Dump("", f"py-spy did not answer within {timeout_s:.0f} s")
    except OSError as error:
        return Dump("", f"py-spy does not start: {error.strerror}")
    if result.returncode == 0:
        return Dump(result.stdout, "")
    said = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    return Dump("", f"py-spy says: {said[0]}" if said else f"py-spy ended with exit code {result.returncode}")
