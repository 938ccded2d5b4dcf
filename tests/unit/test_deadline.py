"""Deadlines that several waits share, and work that is left behind when its deadline has passed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from rl_safe_workers.control import deadline
from rl_safe_workers.control.deadline import FLOOR, Background, Deadline, DeadlineExceededError, run_bounded
from rl_safe_workers.errors import RunError


def test_remaining_shrinks_and_keeps_the_floor() -> None:
    deadline = Deadline.after(timedelta(seconds=5))
    assert timedelta(seconds=4) < deadline.remaining() <= timedelta(seconds=5)
    assert not deadline.expired
    late = Deadline.after(-1.0)
    assert late.expired
    assert late.remaining() == FLOOR


def test_a_share_is_a_fraction_of_what_is_left() -> None:
    share = Deadline.after(10).share(0.5)
    assert timedelta(seconds=4) < share.remaining() <= timedelta(seconds=5)


def test_a_later_deadline_counts_its_wait_from_the_same_moment() -> None:
    deadline = Deadline(time.monotonic() - 3, time.monotonic() - 1).plus(timedelta(seconds=2))
    assert not deadline.expired
    assert deadline.waited_s >= 3


def test_bounded_work_returns_its_value_on_a_thread_of_its_own() -> None:
    assert run_bounded(threading.current_thread, Deadline.after(5), name="work").name == "work"


def test_bounded_work_raises_what_it_raised() -> None:
    with pytest.raises(KeyError, match="x"):
        run_bounded(lambda: {}["x"], Deadline.after(5), name="work")


def test_a_timeout_of_the_work_is_told_from_the_deadline() -> None:
    def time_out() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own") as caught:
        run_bounded(time_out, Deadline.after(5), name="work")
    assert not isinstance(caught.value, DeadlineExceededError)


def test_work_that_does_not_end_is_left_behind_and_goes_on() -> None:
    release = threading.Event()
    with pytest.raises(DeadlineExceededError, match="work did not end in time") as caught:
        run_bounded(release.wait, Deadline.after(0.05), name="work")
    left_behind = caught.value.work
    assert left_behind.thread.daemon
    assert not left_behind.is_done
    release.set()
    assert left_behind.wait(Deadline.after(5)) is True
    assert not left_behind.thread.is_alive()


def test_a_process_that_ends_waits_a_moment_for_work_left_behind() -> None:
    """Else Python might end a thread within C++ code of torch, and the process would abort."""
    start = "import time; from rl_safe_workers.control.deadline import attempt; attempt('work', {}, timeout_s=0.05)"
    soon = start.format("lambda: (time.sleep(0.3), print('ended'))")
    never = start.format("lambda: time.sleep(600)")
    for script, told in (soon, "ended\n"), (never, ""):
        ended = subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True)
        assert ended.stdout == told


def test_what_a_tick_raises_ends_the_wait() -> None:
    release, ticks = threading.Event(), list[int]()

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run_bounded(release.wait, Deadline.after(30), name="work", on_tick=tick, tick_s=0.01)
    release.set()


def test_work_in_the_background_says_when_it_has_ended() -> None:
    release = threading.Event()
    work = Background(release.wait, name="work")
    assert not work.is_done
    release.set()
    assert work.wait(Deadline.after(5)) is True
    assert work.is_done


def _refuse(*args: object, **kwargs: object) -> None:
    raise RuntimeError("can't start new thread")


def _forget(*args: object, **kwargs: object) -> None:
    """Stands for a system that makes a thread which has no memory to begin with."""


@pytest.mark.parametrize(
    ("start", "said"),
    [(_forget, "a new one did not run within 0 s; look at "), (_refuse, "can't start new thread; look at ")],
    ids=["it never runs", "the system refuses it"],
)
def test_a_process_that_can_start_no_thread_says_so(
    start: Callable[..., None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadline, "START_S", 0.1)
    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    monkeypatch.setattr(threading, name, start)
    with pytest.raises(RunError, match=f"^this process can start no thread: {said}"):
        run_bounded(lambda: 1, Deadline.after(60.0), name="work")
