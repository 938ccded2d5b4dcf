"""The line of code that tells where a rank is, out of a stack."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

_STDLIB = sysconfig.get_paths()["stdlib"]
_MACHINERY = (
    "ray/",
    "torch/",
    "<",
    "rl_safe_workers/control/",
    "rl_safe_workers/diagnostics/",
    "rl_safe_workers/driver/actors.py",
)
"""The starts of paths whose frames do not tell where a rank is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A line of a stack.

    Example: ``str(Frame(file="train.py", line=12, function="step"))`` is ``"train.py:12 (step)"``.
    """

    file: str
    """Relative to a folder of ``sys.path`` or to the working directory, if it is below one."""
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"

    @property
    def is_telling(self) -> bool:
        """True if the line belongs neither to Python's library, nor to torch, Ray or our own machinery."""
        return not self.file.startswith((*_MACHINERY, _STDLIB))


@lru_cache(maxsize=4096)
def relative(file: str) -> str:
    """Shortens a path to what follows the working directory or a folder of ``sys.path``."""
    if file.startswith(_STDLIB) and "site-packages" not in file:
        return file  # a file of Python's library stays recognisable
    folders = [path for path in sys.path if path]
    with suppress(OSError):  # somebody has removed the working directory
        folders.append(str(Path.cwd()))
    return min((file.removeprefix(f"{folder}/") for folder in folders), key=len, default=file)


def telling_frame(frames: Iterable[Frame]) -> Frame | None:
    """Returns the first frame that tells where a rank is; the first of all if none does.

    Args:
        frames: Innermost first.
    """
    frames = list(frames)
    return next((frame for frame in frames if frame.is_telling), next(iter(frames), None))


def frames_of(stack: TracebackType | None) -> list[Frame]:
    """Returns the frames of an exception's traceback, innermost first."""
    return [
        Frame(file=relative(frame.f_code.co_filename), line=line, function=frame.f_code.co_name)
        for frame, line in list(traceback.walk_tb(stack))[::-1]
    ]


def place_of(error: BaseException) -> str | None:
    """Returns the line that raised an error, e.g. ``"train.py:12 (step)"``; None if the error was never raised."""
    frame = telling_frame(frames_of(error.__traceback__))
    return None if frame is None else str(frame)
