"""A process's own memory over its steps."""

from __future__ import annotations

import itertools
import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.platforms.host_memory import own_bytes, shared_memory_bytes
from rl_safe_workers.workers.memory_watch import HOST, OUTSIDE, SHARED, MemoryWatch, is_first_here

MIB = 2**20


def test_a_process_that_loses_memory_in_each_step_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    watch, lost = MemoryWatch("training rank 3", torch.device("cpu"), first_here=False), []
    for _ in range(9):
        lost.append(bytearray(b"x") * (20 * MIB))
        watch.step()
    assert f"training rank 3: {HOST} grows by 20 MiB in each step" in caplog.text
    assert watch.growth_mib == pytest.approx(20, abs=1)
    assert len(caplog.records) == 1


def test_shared_memory_is_told_of_by_one_rank_of_a_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used = iter(range(100))
    monkeypatch.setattr("rl_safe_workers.workers.memory_watch.own_bytes", lambda: 3 * MIB)
    monkeypatch.setattr(
        "rl_safe_workers.workers.memory_watch.shared_memory_bytes", lambda: (1000 + 30 * next(used)) * MIB
    )
    watches = [MemoryWatch(f"rank {rank}", torch.device("cpu"), first_here=rank == 0) for rank in range(2)]
    for _ in range(9):
        for watch in watches:
            watch.step()
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 0: {SHARED} grows by 30 MiB in each step, and has 1.21 GiB now"
    ]
    assert [watch.growth_mib for watch in watches] == [30, 0]


def test_memory_outside_torch_is_read_while_the_process_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = threading.Semaphore(0)
    reserved, outside = itertools.chain([7, 8], itertools.repeat(9)), itertools.count(1)

    def slow() -> int:
        assert read.acquire(timeout=10)
        return 50 * MIB * next(outside)

    monkeypatch.setattr("rl_safe_workers.workers.memory_watch.outside_torch", lambda device: slow)
    monkeypatch.setattr("rl_safe_workers.workers.memory_watch.allocated_bytes", lambda device: 0)
    monkeypatch.setattr("rl_safe_workers.workers.memory_watch.reserved_bytes", lambda device: next(reserved))
    watch = MemoryWatch("rank 0", torch.device("cuda", 0), first_here=False)
    # The first reading does not count, because torch's memory has changed meanwhile. The second one is awaited twice.
    for step in range(12):
        watch.step()
        if step != 1:
            read.release()
            _await_reading(watch)
    assert f"rank 0: {OUTSIDE} grows by 50 MiB in each step, and has 0.49 GiB now" in caplog.text


def test_a_reading_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> int:
        raise RuntimeError("CUDA error: out of order")

    monkeypatch.setattr("rl_safe_workers.workers.memory_watch.outside_torch", lambda device: fail)
    monkeypatch.setattr("rl_safe_workers.workers.memory_watch.allocated_bytes", lambda device: 0)
    monkeypatch.setattr("rl_safe_workers.workers.memory_watch.reserved_bytes", lambda device: 0)
    watch = MemoryWatch("rank 0", torch.device("cuda", 0), first_here=False)
    watch.step()
    _await_reading(watch)
    watch.step()
    assert "rank 0: the memory outside torch could not be read: " in caplog.text
    assert "CUDA error: out of order" in caplog.text
    watch.step()  # begins to read anew
    _await_reading(watch)


def _await_reading(watch: MemoryWatch) -> None:
    assert watch._reading is not None
    assert watch._reading.ends(Deadline.after(10))


@pytest.mark.parametrize(
    ("local", "rank", "is_first"), [("0", 8, True), ("1", 0, False), (None, 0, True), (None, 8, False)]
)
def test_one_rank_of_a_machine_is_the_first(
    local: str | None, rank: int, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert is_first_here(rank) is is_first


def test_the_sizes_follow_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_bytes()
    held = bytearray(b"x") * (64 * MIB)
    assert own_bytes() - before == pytest.approx(len(held), rel=0.05)
    told = SimpleNamespace(f_blocks=1000, f_bfree=400, f_frsize=4096)
    monkeypatch.setattr("os.statvfs", {Path("/dev/shm"): told}.__getitem__)
    assert shared_memory_bytes() == 600 * 4096
