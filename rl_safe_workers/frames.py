"""Finds in a stack the line of code that shows where a rank is."""

from __future__ import annotations

import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import FrameType, TracebackType

_STDLIB = sysconfig.get_paths()["stdlib"]
_SITE = re.compile(r"^.*/(site|dist)-packages/")
_ANY_STDLIB = re.compile(r"^/.*/lib/python3\.\d+/(?!(site|dist)-packages/)")
"""The standard library of another interpreter: a process that is looked at may run in another environment."""
COLLECTIVES = "torch/distributed/distributed_c10d.py"
"""The end of the path of torch's collectives."""
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


def collective_of(frames: Sequence[Frame]) -> str | None:
    """Returns the torch collective that frames, innermost first, are in; None if they are in none."""
    # The outermost: all_gather_object gathers sizes first. Those in between are decorators of torch.
    names = [frame.function for frame in frames if frame.file.endswith(COLLECTIVES)]
    return names[-1] if names else None


def frames_of(stack: TracebackType | None) -> list[Frame]:
    """Returns the frames of an exception's traceback, innermost first."""
    return [
        Frame(file=relative(frame.f_code.co_filename), line=line, function=frame.f_code.co_name)
        for frame, line in list(traceback.walk_tb(stack))[::-1]
    ]


def frames_of_threads() -> dict[int, list[Frame]]:
    """Returns the frames of all threads of this process, innermost first, by `threading.Thread.ident`.

    The main thread comes last. Paths are as Python has them, not `relative`.

    ``sys._current_frames`` holds the lock of the list of threads. ``faulthandler.dump_traceback`` does not: with Python
    3.11 it ends the process by SIGSEGV if a thread of a C++ library enters Python at that moment.
    """
    found: dict[int, list[Frame]] = {}
    for thread, frame in sys._current_frames().items():
        found[thread] = []
        innermost: FrameType | None = frame
        while innermost is not None:
            code = innermost.f_code
            found[thread].append(
                Frame(file=code.co_filename, line=innermost.f_lineno or code.co_firstlineno, function=code.co_name)
            )
            innermost = innermost.f_back
    main = threading.main_thread().ident
    return dict(sorted(found.items(), key=lambda item: item[0] == main))


def own_stacks() -> str:
    """Returns the stacks of all threads of this process in faulthandler's format, with the names of the threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for thread, frames in frames_of_threads().items():
        head = f"Thread {thread:#018x} [{names.get(thread, 'of a library')}] (most recent call first):"
        lines = (f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames)
        texts.append("\n".join((head, *lines, "")))
    return "\n".join(texts)


def frames_of_thread(thread: threading.Thread) -> list[Frame]:
    """Returns the frames of a thread of this process, innermost first; none if it has ended."""
    frames = [] if thread.ident is None else frames_of_threads().get(thread.ident, [])
    return [replace(frame, file=relative(frame.file)) for frame in frames]


def place_of(error: BaseException) -> str | None:
    """Returns the line that raised an error, e.g. ``"train.py:12 (step)"``; None if the error was never raised.

    Of an error that was raised from another one, it is the other one's.
    """
    frame = telling_frame(frames_of(_first_cause(error).__traceback__))
    return None if frame is None else str(frame)


def collective_that_raised(error: BaseException) -> str | None:
    """Returns the torch collective that raised an error, or the first one of its causes; None if none did."""
    return collective_of(frames_of(_first_cause(error).__traceback__))


def _first_cause(error: BaseException) -> BaseException:
    seen = {id(error)}  # an error may be its own cause
    while (cause := error.__cause__) is not None and cause.__traceback__ is not None and id(cause) not in seen:
        error = cause
        seen.add(id(error))
    return error
