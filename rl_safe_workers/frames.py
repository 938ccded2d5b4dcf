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
from types import CoroutineType, FrameType, GeneratorType, TracebackType
from typing import Any

_STDLIB = sysconfig.get_paths()["stdlib"]
_SITE = re.compile(r"^.*/(site|dist)-packages/")
_ANY_STDLIB = re.compile(r"^/.*/lib/python3\.\d+/(?!(site|dist)-packages/)")
"""The standard library of any interpreter, because an inspected process may run in another environment."""
COLLECTIVES = "torch/distributed/distributed_c10d.py"
"""The end of the path of torch's collectives."""
_MACHINERY = (
    "ray/",
    "torch/",
    "multiprocess/",
    "psutil/",
    "<",
    "rl_safe_workers/frames.py",
    "rl_safe_workers/root_cause.py",
    "rl_safe_workers/control/",
    "rl_safe_workers/diagnostics/",
    "rl_safe_workers/driver/cluster/actors.py",
)
"""Path prefixes of frames that do not show where a rank is."""
_OURS = "rl_safe_workers/"
_OWN_FOLDER = str(Path(__file__).parents[1])
_LIFECYCLE = ("rl_safe_workers/standalone.py", "rl_safe_workers/workers/safe_trainer.py", "rl_safe_workers/comms/")
"""Path prefixes of our frames that tell less than the user's line that has called them."""
_PARTS_OF_ASYNCIO = re.compile(r"/(asyncio/\w+|selectors)\.py$")


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

    @property
    def is_users(self) -> bool:
        """True if the line shows where a rank is, and is not in this package."""
        return self.is_telling and not self.file.startswith(_OURS)


@lru_cache(maxsize=4096)
def relative(file: str) -> str:
    """Returns a path relative to the working directory or a folder of modules, whichever gives the shortest."""
    if file.startswith(_STDLIB) and "site-packages" not in file:
        return file  # the full path shows that the file is in the standard library
    file = _SITE.sub("", file)
    # An editable installation puts the folder of this package on no path.
    folders = [_OWN_FOLDER, *filter(None, sys.path)]
    with suppress(OSError):  # the working directory may have been removed
        folders.append(str(Path.cwd()))
    return min((file.removeprefix(f"{folder}/") for folder in folders), key=len, default=file)


def telling_frame(frames: Iterable[Frame]) -> Frame | None:
    """Returns the innermost frame that shows where a rank is, else the innermost frame; None without frames.

    Args:
        frames: Frames of a stack, innermost first.
    """
    frames = list(frames)
    telling = [frame for frame in frames if frame.is_telling]
    if telling and telling[0].file.startswith(_LIFECYCLE):
        telling = [frame for frame in telling if not frame.file.startswith(_OURS)] or telling
    return next(iter(telling or frames), None)


def frames_inside(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Returns the frames inside the line that shows where a rank is, innermost first."""
    place = telling_frame(frames)
    return frames if place is None else frames[: list(frames).index(place)]


def is_installed(file: str) -> bool:
    """Returns True if a file, given by its full path, belongs to an installed package."""
    return _SITE.match(file) is not None


def collective_of(frames: Sequence[Frame]) -> str | None:
    """Returns the torch collective that frames, innermost first, are in; None if they are in none."""
    # The outermost, because all_gather_object first gathers sizes. The frames in between are torch's decorators.
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

    The main thread comes last. Paths are Python's own, not `relative`. If a thread's event loop waits for a coroutine,
    the coroutine's frames come first, as if the loop had called it.

    This uses ``sys._current_frames``, which holds the lock of the list of threads. ``faulthandler.dump_traceback`` does
    not hold it: with Python 3.11 the process dies of SIGSEGV if a C++ library's thread enters Python at that moment.
    """
    found: dict[int, list[Frame]] = {}
    for thread, frame in sys._current_frames().items():
        found[thread] = _frames_of_awaited(frame)
        innermost: FrameType | None = frame
        while innermost is not None:
            found[thread].append(_frame(innermost))
            innermost = innermost.f_back
    main = threading.main_thread().ident
    return dict(sorted(found.items(), key=lambda item: item[0] == main))


def _frame(frame: FrameType) -> Frame:
    code = frame.f_code
    return Frame(file=code.co_filename, line=frame.f_lineno or code.co_firstlineno, function=code.co_name)


def _frames_of_awaited(frame: FrameType) -> list[Frame]:
    """Returns the frames of the coroutine that a thread's event loop waits for, innermost first.

    Returns an empty list if the thread runs something else, or if the loop does not run until a coroutine completes.

    Args:
        frame: The innermost frame of the thread.
    """
    asyncio = sys.modules.get("asyncio")
    task, at = None, frame if asyncio is not None else None
    while at is not None and _PARTS_OF_ASYNCIO.search(at.f_code.co_filename):
        task = next(iter(_tasks(at.f_locals.values())), task)  # `asyncio.run` and `run_until_complete` hold theirs
        at = at.f_back
    found: list[FrameType] = []
    seen = set()
    while task is not None and id(task) not in seen:
        seen.add(id(task))
        awaited = task.get_coro()
        while (at := _frame_of_coroutine(awaited)) is not None:
            found.append(at)
            awaited = awaited.cr_await if isinstance(awaited, CoroutineType) else awaited.gi_yieldfrom
        waiter = task._fut_waiter
        inside = found[-1].f_locals.values() if found and _PARTS_OF_ASYNCIO.search(found[-1].f_code.co_filename) else ()
        # The tasks of `gather`, of an awaited task, of `wait` and `wait_for`, and of a task group.
        waits_for = _tasks(
            [getattr(waiter, "_children", waiter), *inside, *(getattr(one, "_tasks", ()) for one in inside)]
        )
        task = next(iter(waits_for), None)
    return [_frame(one) for one in reversed(found)]


def _tasks(values: Iterable[Any]) -> list[Any]:
    """Returns the asyncio tasks that have not ended, among values and inside collections of values."""
    flat = [one for value in list(values) for one in (list(value) if type(value) in (set, list, tuple) else [value])]
    asyncio = sys.modules["asyncio"]
    return [one for one in flat if issubclass(type(one), asyncio.Task) and not one.done()]


def _frame_of_coroutine(awaited: object) -> FrameType | None:
    if isinstance(awaited, CoroutineType):
        return awaited.cr_frame
    return awaited.gi_frame if isinstance(awaited, GeneratorType) else None


def own_stacks() -> str:
    """Returns the stacks of all threads of this process in faulthandler's format.

    The head of each stack also has the thread's name and its id in the kernel.
    """
    names = {thread.ident: (thread.name, thread.native_id) for thread in threading.enumerate()}
    texts = []
    for thread, frames in frames_of_threads().items():
        name, native_id = names.get(thread, ("of a library", None))
        number = "" if native_id is None else f" {native_id}"
        head = f"Thread {thread:#018x}{number} [{name}] (most recent call first):"
        lines = (f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in frames)
        texts.append("\n".join((head, *lines, "")))
    return "\n".join(texts)


def frames_of_thread(thread: threading.Thread) -> list[Frame]:
    """Returns the frames of a thread of this process, innermost first; none if it has ended."""
    frames = [] if thread.ident is None else frames_of_threads().get(thread.ident, [])
    return [replace(frame, file=relative(frame.file)) for frame in frames]


def place_of(error: BaseException) -> str | None:
    """Returns the line that raised an error, e.g. ``"train.py:12 (step)"``; None if the error was never raised.

    For a chain of errors, each raised from the one before, this is the line that raised the first.
    """
    frame = telling_frame(frames_of(_first_cause(error).__traceback__))
    return None if frame is None else str(frame)


def collective_that_raised(error: BaseException) -> str | None:
    """Returns the torch collective that raised an error, or the first error of its chain; None if none did."""
    return collective_of(frames_of(_first_cause(error).__traceback__))


def _first_cause(error: BaseException) -> BaseException:
    seen = {id(error)}  # an error may be its own cause
    while (cause := error.__cause__) is not None and cause.__traceback__ is not None and id(cause) not in seen:
        error = cause
        seen.add(id(error))
    return error
