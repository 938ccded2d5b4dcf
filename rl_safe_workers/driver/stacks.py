"""Where a process is: the stacks that faulthandler or py-spy have written, read."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_THREAD = re.compile(r"(Current thread|Thread) ")
_FRAMES = (
    re.compile(r'^ {2}File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$'),  # faulthandler
    re.compile(r"^ {4}(?P<function>\S.*) \((?P<file>.+):(?P<line>\d+)\)$"),  # py-spy
)
_STDLIB = sysconfig.get_paths()["stdlib"]
_MACHINERY = ("ray/", "torch/", "<", "rl_safe_workers/driver/actors.py")
"""What begins the paths of frames that say nothing of where a rank is."""
_COLLECTIVES = "torch/distributed/distributed_c10d.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line of a stack."""

    file: str
    """Relative to where Python found it, if it did."""
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where a process is: the thread that runs its calls, or its oldest one while it runs none."""

    frames: Sequence[Frame]
    """Innermost first."""
    is_in_a_call: bool
    op: str | None
    """The torch collective that some thread is in."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what faulthandler or py-spy has written."""
        threads: list[list[Frame]] = [[]]
        main = -1  # faulthandler goes from the youngest to the oldest; py-spy gives their names
        for line in text.splitlines():
            if _THREAD.match(line):
                main = len(threads) if '"MainThread"' in line else main
                threads.append([])
            for found in filter(None, (pattern.match(line) for pattern in _FRAMES)):
                frame = Frame(file=relative(found["file"]), line=int(found["line"]), function=found["function"])
                threads[-1].append(frame)
        calls = [thread for thread in threads if any(map(_is_call, thread))]
        frames = calls[0] if calls else threads[main]
        ops = [op for thread in (frames, *threads) if (op := _op_of(thread)) is not None]
        return cls(frames=frames, is_in_a_call=bool(calls), op=ops[0] if ops else None)

    @property
    def place(self) -> Frame | None:
        """The innermost frame that tells something; any other if none does."""
        telling = [frame for frame in self.frames if not frame.file.startswith((*_MACHINERY, _STDLIB))]
        return next(iter([*telling, *self.frames]), None)


def relative(file: str) -> str:
    """A path as Python finds it from here, if it does."""
    if file.startswith(_STDLIB) and "site-packages" not in file:
        return file  # so that it is known for what it is
    return min((file.removeprefix(f"{path}/") for path in [str(Path.cwd()), *sys.path] if path), key=len)


def _is_call(frame: Frame) -> bool:
    return frame.function.rpartition(".")[2] == "call" and frame.file.endswith("driver/actors.py")


def _op_of(frames: Sequence[Frame]) -> str | None:
    # The outermost: all_gather_object gathers sizes first. Those in between are decorators of torch.
    names = [frame.function for frame in frames if frame.file.endswith(_COLLECTIVES)]
    return names[-1] if names else None


def py_spy(pid: int, *, timeout_s: float) -> str:
    """Stacks of a process that cannot write them, if py-spy is installed and may look."""
    command = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if command is None:
        return ""
    try:
        # Without it py-spy stops the process while it looks, and lets it go on: not ours to do with a stopped one.
        result = subprocess.run(
            [command, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)],
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""
