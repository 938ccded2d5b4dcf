"""One deadline, and one way to run work under it. Pure Python: the driver and the doctor use it, too."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, Self, TypeVar
from weakref import WeakSet

from rl_safe_workers.errors import RunError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FLOOR = timedelta(seconds=0.1)
"""Shortest time that `Deadline.remaining` returns: for torch, a timeout of zero means no timeout."""
START_S = 10.0
"""Longest time that a thread may take to begin, in seconds."""
TICK_S = 0.2
"""Time between two ticks of a wait, in seconds."""
_EXIT_S = 0.5
"""Longest time that the end of this process waits for work that was left behind, in seconds."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of the monotonic clock that several waits share.

    Example: ``deadline = Deadline.after(timedelta(minutes=5))``, then ``store.wait(keys, deadline.remaining())``.

    Attributes:
        started_s: When it was set, in seconds of the monotonic clock.
        at_s: When it passes, in seconds of the monotonic clock.
    """

    started_s: float
    at_s: float

    @classmethod
    def after(cls, time_left: timedelta | float) -> Self:
        """Returns the deadline that passes after a time from now: a timedelta, or seconds."""
        now_s = time.monotonic()
        return cls(now_s, now_s + (time_left.total_seconds() if isinstance(time_left, timedelta) else time_left))

    @property
    def left_s(self) -> float:
        """Seconds left; negative once it has passed."""
        return self.at_s - time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self.started_s

    @property
    def expired(self) -> bool:
        """True once it has passed."""
        return self.left_s <= 0

    def remaining(self) -> timedelta:
        """Returns the time left in whole milliseconds, rounded up, at least `FLOOR`.

        torch's stores round down to milliseconds, so that a wait would end before the deadline.
        """
        if not math.isfinite(self.at_s):
            return timedelta.max
        return max(FLOOR, timedelta(milliseconds=math.ceil(1e3 * self.left_s)))

    def share(self, fraction: float) -> Deadline:
        """Returns an earlier deadline: after a fraction, 0 to 1, of the time that is left now."""
        return Deadline.after(fraction * self.remaining())

    def at_most(self, time_left: timedelta) -> Deadline:
        """Returns this deadline, or an earlier one that passes after a time from now."""
        return Deadline(self.started_s, min(self.at_s, time.monotonic() + time_left.total_seconds()))

    def plus(self, more: timedelta) -> Deadline:
        """Returns a later deadline; ``started_s`` stays."""
        return Deadline(self.started_s, self.at_s + more.total_seconds())


class DeadlineExceededError(TimeoutError):
    """Work did not end within its deadline. The code that set the deadline turns it into an error of the package.

    Attributes:
        work: The work, which goes on.
    """

    def __init__(self, work: Background[T]) -> None:
        self.work: Background[T] = work
        super().__init__(f"{work.name} did not end in time")


class _Begun(threading.Event):
    """The event that a new thread sets once it runs. ``threading.Thread.start`` waits for it without a deadline."""

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(START_S if timeout is None else timeout):
            raise RunError(
                f"this process can start no thread: a new one did not run within {START_S:.0f} s; look at its memory "
                "limit (ulimit -v), at the memory that is left, and at the number of its threads (ulimit -u)"
            )
        return True


class Thread(threading.Thread):
    """A daemon thread that raises if it cannot start. Python itself waits forever without memory to start one."""

    def __init__(self, target: Callable[..., object], *, args: tuple[object, ...] = (), name: str) -> None:
        """Makes a daemon thread; the arguments are those of ``threading.Thread``."""
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._started = _Begun()  # the name is the same in Python 3.10 to 3.14

    def start(self) -> None:
        """Starts the thread.

        Raises:
            RunError: If the thread does not run within `START_S`, or the system refuses it.
        """
        try:
            super().start()
        except RuntimeError as error:
            if self.ident is not None:
                raise  # it was started before
            raise RunError(
                f"this process can start no thread: {error}; look at its limits (ulimit -v, ulimit -u)"
            ) from error


_left_behind: WeakSet[threading.Thread] = WeakSet()
"""Threads of work that did not end in time."""


class Background(Generic[T]):
    """Work on a daemon thread of its own, not of a thread pool: a process waits for a pool's threads at its end.

    Attributes:
        name: Name of the work, for the thread and for errors.
        thread: The thread, started.
    """

    def __init__(self, work: Callable[[], T], *, name: str) -> None:
        """Starts the work.

        Raises:
            RunError: If the process can start no thread.
        """
        self.name = name
        self._outcome: Future[T] = Future()
        self.thread = Thread(_fulfil, args=(work, self._outcome), name=name)
        self.thread.start()

    @property
    def is_done(self) -> bool:
        """True once the work has returned or raised."""
        return self._outcome.done()

    def ends(self, deadline: Deadline) -> bool:
        """Waits until the work has returned or raised; returns False if the deadline passes first."""
        # A longer wait overflows the lock's own clock.
        return bool(wait([self._outcome], max(0.0, min(deadline.left_s, threading.TIMEOUT_MAX))).done)

    def wait(self, deadline: Deadline, *, on_tick: Callable[[], object] | None = None, tick_s: float = TICK_S) -> T:
        """Waits for the work; returns its value.

        Args:
            deadline: Longest wait. The work goes on after it.
            on_tick: Called repeatedly during the wait. If it raises, the wait ends with that error.
            tick_s: Seconds between two such calls.

        Raises:
            BaseException: What the work has raised.
            DeadlineExceededError: If the work has not ended in time.
        """
        while not self.ends(deadline if on_tick is None else deadline.at_most(timedelta(seconds=tick_s))):
            if on_tick is not None:
                on_tick()
            if deadline.expired:
                _left_behind.add(self.thread)
                raise DeadlineExceededError(self)
        # The work has ended, so the thread ends soon. Join it, so that no thread is left.
        self.thread.join()
        return self._outcome.result()


@atexit.register
def _let_work_end() -> None:
    """Waits a moment for work that was left behind.

    A thread that returns from a call of torch's store while Python ends aborts the process: Python ends the thread
    within C++ code that forbids it ("terminate called without an active exception"). Such a call often fails just
    before the process ends, for instance because the process has killed the store's owner.
    """
    deadline = Deadline.after(_EXIT_S)
    for thread in list(_left_behind):
        thread.join(max(0.0, deadline.left_s))


def _fulfil(work: Callable[[], T], outcome: Future[T]) -> None:
    try:
        value = work()
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(value)


def run_bounded(
    work: Callable[[], T],
    deadline: Deadline,
    *,
    name: str,
    on_tick: Callable[[], object] | None = None,
    tick_s: float = TICK_S,
) -> T:
    """Does work on a thread of its own; returns its value.

    Args:
        work: Work that may hang.
        deadline: Longest wait. After it, the thread goes on alone.
        name: Name of the work, for the thread and for errors.
        on_tick: Called repeatedly during the wait. If it raises, the wait ends with that error, and the thread goes on.
        tick_s: Seconds between two such calls.

    Raises:
        BaseException: What the work has raised.
        DeadlineExceededError: If the work has not ended in time.
    """
    return Background(work, name=name).wait(deadline, on_tick=on_tick, tick_s=tick_s)


def attempt(what: str, action: Callable[[], object], *, timeout_s: float) -> bool:
    """Does one step of a clean-up. Never raises: a failure is logged, and the next step can run.

    Args:
        what: The step, for the log, e.g. ``"shutting down Ray"``.
        action: Runs on a thread of its own, which is left behind if it does not end in time.
        timeout_s: Longest wait, in seconds.

    Returns:
        True if it succeeded in time.
    """
    try:
        run_bounded(action, Deadline.after(timeout_s), name=what)
    except DeadlineExceededError:
        logger.warning("%s did not finish within %.0f s", what, timeout_s)
        return False
    except Exception as error:  # the process is ending, and the other steps must run
        logger.warning("%s failed: %s: %s", what, type(error).__name__, error)
        return False
    return True
