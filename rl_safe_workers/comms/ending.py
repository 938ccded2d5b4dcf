"""Ends communicators within a deadline: all at once, aborted where that takes too long."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch

from rl_safe_workers.control.deadline import Background, Deadline, DeadlineExceededError
from rl_safe_workers.errors import CommunicatorError, foreign_cause, in_one_line

logger = logging.getLogger(__name__)

T = TypeVar("T")

Named = tuple[str, Any]
"""One of torch's backends, and a name for messages."""


def end_together(backends: list[Named], patience: timedelta) -> Exception | None:
    """Shuts communicators down, also past failures. Collective over: each group, on NCCL.

    All at once: then no group waits for another, whatever the order, and the half second that each takes to stop its
    threads passes once. Where that does not end, as when a peer has died, they are aborted, which needs no peer.

    Args:
        backends: What to end; those that have ended are taken out.
        patience: Longest time for all of it.

    Returns:
        The first failure, or None.
    """
    failure = _end(backends, "shutdown", patience / 2)
    if failure is not None:
        logger.warning("%s; aborting the communicators", failure)
        end_alone(backends, patience / 2)
    return failure


def end_alone(backends: list[Named], patience: timedelta) -> Exception | None:
    """Aborts communicators, whatever their other members do. Not collective. Otherwise as `end_together`."""
    return _end(backends, "abort", patience)


def _end(backends: list[Named], how: str, patience: timedelta) -> Exception | None:
    failures: list[Exception] = []

    def end(holder: list[Named]) -> None:
        # The last reference is this thread's own: gloo takes 10 ms to close a group's connections when it goes.
        named = holder.pop()
        failure = failure_of(getattr(named[1], how))
        if failure is not None:
            text = f"group {named[0]}: {in_one_line(failure)}"
            failures.append(CommunicatorError(text, foreign=foreign_cause(failure)))
            return
        with suppress(ValueError):  # aborted meanwhile
            backends.remove(named)

    def end_all() -> None:
        if how == "shutdown":
            _at_once([partial(end, [named]) for named in backends])
            return
        held = list(backends)  # until NCCL has aborted them all
        with _one_abort(backend for _, backend in held):
            for named in held:
                end([named])

    late = failure_of(lambda: within(end_all, patience, what=f"{how} of communicators"))
    return late or (failures[0] if failures else None)


@contextmanager
def _one_abort(backends: Iterable[Any]) -> Iterator[None]:
    """Makes one of all aborts of NCCL's in the body, so that none waits for another (pytorch#119797)."""
    nccl = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
    if nccl is not None:
        nccl._group_start()
    try:
        yield
    finally:
        if nccl is not None:
            nccl._group_end()


def _at_once(works: Sequence[Callable[[], None]]) -> None:
    """Does each in a thread of its own and waits for all."""
    never = Deadline.after(math.inf)
    for work in [in_background(work) for work in works]:
        work.wait(never)


def in_background(work: Callable[[], T]) -> Background[T]:
    """Does work on a thread of its own, on this thread's device."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> T:
        if device is not None:
            torch.cuda.set_device(device)
        return work()

    return Background(run, name="rl_safe ending")


def within(work: Callable[[], object], patience: timedelta, *, what: str) -> None:
    """Does on a thread of its own what has no deadline of its own; raises what it raised.

    Raises:
        CommunicatorError: If it has not ended after ``patience``. The thread is left behind.
    """
    try:
        failure = in_background(lambda: failure_of(work)).wait(Deadline.after(patience))
    except DeadlineExceededError:
        raise CommunicatorError(f"{what} did not end within {patience.total_seconds():.1f} s") from None
    if failure is not None:
        raise failure


def failure_of(work: Callable[[], object]) -> Exception | None:
    """Does something and returns what it raised, to be told to the others."""
    try:
        work()
    except Exception as error:
        link: BaseException | None = error
        while link is not None:
            # What a frame holds, such as a work of gloo, would keep the connections open.
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        return error
    return None
