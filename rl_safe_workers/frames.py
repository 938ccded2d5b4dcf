"""Finds in a stack the line of code that shows where a rank is."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

_STDLIB = sysconfig.get_paths()["stdlib"]
_SITE = re.compile(r"^.*/(site|dist)-packages/")
_ANY_STDLIB = re.compile(r"^/.*/lib/python3\.\d+/(?!(site|dist)-packages/)")
"""The standard library of another interpreter: a process that is looked at may run in another environment."""
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
FAULTHANDLER_FRAME = re.compile(r'^ {2}File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
"""A frame, as faulthandler writes it."""
_STACKS_BYTES = 2**20
"""Most bytes of the stacks of all threads."""
_MACHINERY = (
    "ray/",
    "torch/",
    "multiprocess/",
    "<",
    "rl_safe_workers/control/",
    "rl_safe_workers/diagnostics/",
    "rl_safe_workers/driver/cluster/actors.py",
)
"""Path prefixes of frames that do not show where a rank is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line of a stack.

    Example: ``str(Frame(file="train.py", line=12, function="step"))`` is ``"train.py:12 (step)"``.
    """

    file: str
    """Path of the source file, relative to a folder of ``sys.path`` or to the working directory if it is below one."""
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"

    @property
    def is_telling(self) -> bool:
        """True if the line is not in Python's standard library, torch, Ray, or our own control code."""
        return not self.file.startswith((*_MACHINERY, _STDLIB)) and _ANY_STDLIB.match(self.file) is None


@lru_cache(maxsize=4096)
def relative(file: str) -> str:
    """Returns a path relative to the working directory or a folder of ``sys.path``, whichever gives the shortest."""
    if file.startswith(_STDLIB) and "site-packages" not in file:
        return file  # the full path shows that the file is in the standard library
    file = _SITE.sub("", file)
    folders = [path for path in sys.path if path]
    with suppress(OSError):  # the working directory may have been removed
        folders.append(str(Path.cwd()))
    return min((file.removeprefix(f"{folder}/") for folder in folders), key=len, default=file)


def telling_frame(frames: Iterable[Frame]) -> Frame | None:
    """Returns the innermost frame that shows where a rank is; the innermost of all if none does; None without frames.

    Args:
        frames: Frames of a stack, innermost first.
    """
    frames = list(frames)
    return next((frame for frame in frames if frame.is_telling), next(iter(frames), None))


def frames_of(stack: TracebackType | None) -> list[Frame]:
    """Returns the frames of an exception's traceback, innermost first."""
    return [
        Frame(file=relative(frame.f_code.co_filename), line=line, function=frame.f_code.co_name)
        for frame, line in list(traceback.walk_tb(stack))[::-1]
    ]


def stacks_of_threads(scratch: int) -> str:
    """Returns the stacks of all threads of this process, as faulthandler writes them.

    faulthandler reads them in C, while no other thread runs. Code in Python that follows the frames of a running thread
    (``sys._current_frames``, then ``f_back``) ended processes by SIGSEGV with Python 3.11.7.

    Args:
        scratch: The descriptor of a file in memory (``os.memfd_create``). It is overwritten.
    """
    os.ftruncate(scratch, 0)
    os.lseek(scratch, 0, os.SEEK_SET)
    faulthandler.dump_traceback(file=scratch, all_threads=True)
    return os.pread(scratch, _STACKS_BYTES, 0).decode("utf-8", errors="replace")


def own_stacks() -> str:
    """Returns `stacks_of_threads` for a caller that has no file for it."""
    scratch = os.memfd_create("stacks")
    try:
        return stacks_of_threads(scratch)
    finally:
        os.close(scratch)


def frames_of_thread(thread: threading.Thread) -> list[Frame]:
    """Returns the frames of a thread of this process, innermost first; none if it has ended."""
    text = own_stacks()
    found, is_of_thread = [], False
    for line in text.splitlines():
        if (head := _THREAD.match(line)) is not None:
            is_of_thread = int(head[1], 16) == thread.ident
        elif is_of_thread and (frame := FAULTHANDLER_FRAME.match(line)) is not None:
            found.append(Frame(file=relative(frame["file"]), line=int(frame["line"]), function=frame["function"]))
    return found


def place_of(error: BaseException) -> str | None:
    """Returns the line that raised an error, e.g. ``"train.py:12 (step)"``; None if the error was never raised.

    Of an error that was raised from another one, it is the other one's.
    """
    seen = {id(error)}  # an error may be its own cause
    while (cause := error.__cause__) is not None and cause.__traceback__ is not None and id(cause) not in seen:
        error = cause
        seen.add(id(error))
    frame = telling_frame(frames_of(error.__traceback__))
    return None if frame is None else str(frame)
