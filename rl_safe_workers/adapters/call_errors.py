"""Finds the actor that raised an error, and its traceback. Ray drops both when it raises the error in the caller.

``RayTaskError.as_instanceof_cause`` makes an error of the cause's class, without the private ``_actor_id``. Seen in Ray
2.55 to 2.60.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any, NamedTuple

from ray.exceptions import RayTaskError

from rl_safe_workers.diagnostics.log_lines import frame_line
from rl_safe_workers.errors import Raised, RankError, Victim, foreign_cause
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.frames import Frame, relative, telling_frame
from rl_safe_workers.lifecycle import unix_now
from rl_safe_workers.ranks import RankId

_ORIGIN = "rl_safe_origin"


class CallError(NamedTuple):
    """An error that a remote call to an actor has raised."""

    actor_id: str
    """Ray's hexadecimal id."""
    text: str
    """``"TypeName: message"`` of the error."""
    place: str | None
    """The line of code that raised it, e.g. ``"engine.py:12 (step)"``; None if its traceback has none."""
    trace: str
    foreign: ForeignCause
    heard_at: float
    """Unix time in seconds."""

    def report(self, rank_id: RankId, phase: str) -> RankError:
        """Returns the error as a failure of the actor's rank.

        Args:
            rank_id: The actor's rank.
            phase: The phase that the rank was in.
        """
        about_others = self.foreign.is_about_others
        return RankError(
            rank_id=rank_id,
            phase=phase,
            cause=Victim() if about_others else Raised(),
            text=self.text,
            trace=self.trace,
            raised_at=self.heard_at,
            place=self.place,
            foreign=ForeignCause.UNKNOWN if about_others else self.foreign,
        )


def keep_origins() -> None:
    """Patches Ray so that errors raised in this process keep their actor, for `call_error_of`. Idempotent."""
    stock: Any = RayTaskError.as_instanceof_cause
    if getattr(stock, "__wrapped__", None) is not None:
        return

    @wraps(stock)
    def as_instanceof_cause(error: RayTaskError) -> RayTaskError:
        made: RayTaskError = stock(error)
        if made is not error:
            vars(made)[_ORIGIN] = error
        return made

    RayTaskError.as_instanceof_cause = as_instanceof_cause


def call_error_of(error: BaseException) -> CallError | None:
    """Returns the failed actor call that caused an error; None if no call caused it.

    Searches the error and the chain of its causes. Skips an actor that only passes on an error from its own call to
    another actor.

    Args:
        error: Raised in this process after `keep_origins`.
    """
    for link in links_of(error):
        origin = vars(link).get(_ORIGIN, link)
        if not isinstance(origin, RayTaskError) or isinstance(origin.cause, RayTaskError):
            continue
        actor_id = vars(origin).get("_actor_id")
        if actor_id:
            cause, trace = origin.cause, str(origin.traceback_str)
            text = f"{type(cause).__name__}: {cause}"
            return CallError(str(actor_id), text, _place(trace), trace, foreign_cause(cause), unix_now())
    return None


def links_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, then its cause (``__cause__``), then the cause of that, and so on."""
    link: BaseException | None = error
    seen = set[int]()  # an error may be its own cause
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__


def _place(trace: str) -> str | None:
    lines = [found for line in trace.splitlines() if (found := frame_line(line)) is not None]
    frames = [Frame(file=relative(file), line=line, function=function) for file, line, function in reversed(lines)]
    frame = telling_frame(frames)
    return None if frame is None else str(frame)
