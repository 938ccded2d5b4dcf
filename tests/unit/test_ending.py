"""Communicators end all at once and within a deadline, or are aborted."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from rl_safe_workers.comms.teardown import end_alone, end_together
from rl_safe_workers.control.bounded import within
from rl_safe_workers.errors import CommunicatorError

SOON = timedelta(seconds=0.4)


class Backend:
    """Notes what is called; waits in ``shutdown`` for an event, if it has one."""

    def __init__(self, waits_for: threading.Event | None = None, failure: Exception | None = None) -> None:
        self.calls: list[str] = []
        self._waits_for, self._failure = waits_for, failure

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        if self._waits_for is not None:
            self._waits_for.wait(10)
        if self._failure is not None:
            raise self._failure

    def abort(self) -> None:
        self.calls.append("abort")


class Nccl(Backend):
    """Notes, in one list for all, where NCCL's group of calls begins and ends."""

    def __init__(self, order: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._order = order

    def _group_start(self) -> None:
        self._order.append("start")

    def _group_end(self) -> None:
        self._order.append("end")

    def abort(self) -> None:
        self._order.append("abort")


def test_no_group_waits_for_another() -> None:
    # One by one this would wait for ever: the first ends only once the second has begun.
    begun = threading.Event()
    second = Backend()
    second.shutdown = begun.set  # type: ignore[method-assign]
    backends: list[Any] = [("first", Backend(waits_for=begun)), ("second", second)]
    assert end_together(backends, timedelta(seconds=5)) is None
    assert backends == []


def test_what_does_not_end_is_aborted_and_told() -> None:
    release = threading.Event()
    well, stuck = Backend(), Backend(waits_for=release)
    backends: list[Any] = [("well", well), ("stuck", stuck)]
    started_s = time.monotonic()
    failure = end_together(backends, SOON)
    assert time.monotonic() - started_s < 10
    assert str(failure) == "shutdown of communicators did not end within 0.2 s"
    assert (well.calls, stuck.calls) == (["shutdown"], ["shutdown", "abort"])
    # What was left behind ends all the same, later, and does no harm.
    release.set()
    for thread in threading.enumerate():
        if thread.name == "rl_safe: ending a group":
            thread.join(5)
    assert backends == []


def test_what_fails_is_named_and_aborted_and_the_rest_ends_all_the_same() -> None:
    failing, well = Backend(failure=RuntimeError("no luck\nat all")), Backend()
    failure = end_together([("pp [0, 2]", failing), ("tp [0, 1]", well)], SOON)
    assert isinstance(failure, CommunicatorError)
    assert str(failure) == "group pp [0, 2]: RuntimeError: no luck"
    assert (failing.calls, well.calls) == (["shutdown", "abort"], ["shutdown"])


def test_aborts_of_nccl_are_one_call() -> None:
    order: list[str] = []
    assert end_alone([("a", Nccl(order)), ("b", Nccl(order))], SOON) is None
    assert order == ["start", "abort", "abort", "end"]


def test_work_within_a_deadline_raises_what_it_raised() -> None:
    def fail() -> None:
        raise KeyError("x")

    within(lambda: None, SOON, what="nothing")
    with pytest.raises(KeyError):
        within(fail, SOON, what="this")
