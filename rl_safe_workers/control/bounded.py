"""Runs work of a process with a GPU on a thread of its own, under a deadline, and raises our own errors."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch

from rl_safe_workers.control.deadline import Background, Deadline, DeadlineExceededError
from rl_safe_workers.errors import CommunicatorError

T = TypeVar("T")


def in_background(work: Callable[[], T], *, name: str) -> Background[T]:
    """Starts work on a thread of its own, on this thread's device.

    Args:
        work: The work.
        name: The work in words, for stacks of this process.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> T:
        if device is not None:
            torch.cuda.set_device(device)
        return work()

    return Background(run, name=f"rl_safe: {name}")


def within(work: Callable[[], object], patience: timedelta, *, what: str) -> None:
    """Runs work that has no deadline of its own on a new thread, under a deadline. Raises what the work raises.

    Raises:
        CommunicatorError: If it has not ended after ``patience``. The thread is left behind.
    """
    try:
        failure = in_background(lambda: failure_of(work), name=what).wait(Deadline.after(patience))
    except DeadlineExceededError:
        raise CommunicatorError(f"{what} did not end within {patience.total_seconds():.1f} s") from None
    if failure is not None:
        raise failure


def failure_of(work: Callable[[], object]) -> Exception | None:
    """Runs work and returns the exception that it raised, or None, so that the caller can tell the other ranks."""
    try:
        work()
    except Exception as error:
        link: BaseException | None = error
        while link is not None:
            # Objects in a frame, such as a work of gloo, would keep the connections open.
            traceback.clear_frames(link.__traceback__)
            link = link.__cause__ or link.__context__
        return error
    return None
