"""Saves that are written while training goes on: what they hold, who waits for them, and what a failure comes to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.checkpoint.audit import audit
from rl_safe_workers.checkpoint.folders.manifest import complete_checkpoints
from rl_safe_workers.checkpoint.save import saver
from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import CheckpointError, CommunicatorError
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, exchange_address, run_config, served_store

SIZE = 2
IDENTITY = {"fingerprint": "tiny", "layout": {"world_size": SIZE}}
FOR_EVER_S = 600.0
"""Longer than a test may take: who waits for a timeout of this does not get to the end."""


class HeldWriter:
    """Takes the place of the writer of shards on this rank, and writes when it is let."""

    def __init__(self) -> None:
        self._write, self._may_write = saver.write_items, threading.Event()
        self._writing = self.most_at_once = 0
        saver.write_items = self

    def __call__(self, path: Path, items: Any) -> Any:
        self._writing += 1
        self.most_at_once = max(self.most_at_once, self._writing)
        self._may_write.wait()
        self._writing -= 1
        return self._write(path, items)

    def hold(self) -> None:
        self._may_write.clear()

    def release_soon(self) -> None:
        """While this rank waits for something."""
        threading.Timer(0.3, self._may_write.set).start()


def _worker(rank: int, address: StoreAddress, config: RunConfig) -> Worker:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    worker.convert()
    return worker


def _save(worker: Worker, root: Path, step: int) -> Path:
    driver_state = {"step": step}
    path = worker.save_checkpoint(root, step=step, driver_state=driver_state, **IDENTITY)
    driver_state["step"] = -1
    return path


def _step(worker: Worker, seed: int = 0) -> None:
    worker.step(reference.random_batch(rows=8, seed=seed))


def _poll_to_the_end(worker: Worker) -> None:
    while worker.poll_checkpoint():
        time.sleep(0.01)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "checkpoint"]


def _live(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> dict[str, Any]:
    """Six saves, each written only once someone waits for it."""
    worker, writer, found = _worker(rank, address, config), HeldWriter(), {}
    _step(worker)
    saved = worker.digest()
    path = _save(worker, root, 1)
    found["exists at once"] = path.exists()
    found["polls"] = [worker.poll_checkpoint() for _ in range(3)]
    _step(worker, seed=1)
    found["moved"] = worker.digest() != saved
    waits: dict[str, Callable[[], Any]] = {
        "offload": worker.offload,
        "the next save": lambda: _save(worker, root, 10),
        "load": lambda: worker.load_checkpoint(root / "global_step_1", **IDENTITY),
        "finalize": worker.finalize_checkpoint,
        "teardown": worker.teardown,
    }
    for step, (name, wait) in enumerate(waits.items(), start=1):
        if step > 1:
            writer.hold()
            path = _save(worker, root, step)
        before = path.exists()
        writer.release_soon()
        found[f"result of {name}"] = wait()
        found[name] = (before, path.exists())
        if name == "offload":
            worker.onload()
        if name == "load":
            found["comes back"] = worker.digest() == saved
    return {**found, "most at once": writer.most_at_once, "threads": _threads()}


@pytest.fixture(scope="module")
def config(seeded_models) -> RunConfig:
    config = run_config(seeded_models["moe"], ep=2)
    config.rl_safe.checkpoint.async_save = config.rl_safe.checkpoint.digest = True
    config.rl_safe.checkpoint.keep_last = 0
    return config


@pytest.fixture(scope="module")
def lives(config: RunConfig, tmp_path_factory) -> tuple[list[dict[str, Any]], Path]:
    root = tmp_path_factory.mktemp("lives")
    with served_store() as address:
        return values(run_ranks(_live, SIZE, address, config, root)), root


def _of(lives: tuple[list[dict[str, Any]], Path], name: str) -> list[Any]:
    return [rank[name] for rank in lives[0]]


def test_a_save_returns_before_its_checkpoint_exists_and_a_poll_does_not_wait_for_it(lives) -> None:
    assert _of(lives, "exists at once") == [False] * SIZE
    assert _of(lives, "polls") == [[True] * 3] * SIZE


@pytest.mark.parametrize("wait", ["offload", "the next save", "load", "finalize", "teardown"])
def test_what_a_save_must_not_reach_into_finishes_it_first(lives, wait: str) -> None:
    assert _of(lives, wait) == [(False, True)] * SIZE


def test_a_training_step_during_a_save_is_not_in_it(lives) -> None:
    assert _of(lives, "moved") == [True] * SIZE
    assert _of(lives, "comes back") == [True] * SIZE


def test_at_most_one_save_is_written_at_a_time_and_no_thread_is_left(lives) -> None:
    assert _of(lives, "most at once") == [1] * SIZE
    assert _of(lives, "threads") == [[]] * SIZE


def test_all_are_well_and_every_checkpoint_passes_the_audit(lives) -> None:
    assert _of(lives, "result of teardown") == [{}] * SIZE
    assert _of(lives, "result of finalize") == [lives[1] / "global_step_4"] * SIZE
    found = complete_checkpoints(lives[1])
    assert sorted(manifest.step for _, manifest in found) == [1, 2, 3, 4, 5, 10]
    assert all(manifest.driver_state == {"step": manifest.step} for _, manifest in found)
    assert [audit(path, deep=True).problems for path, _ in found] == [()] * 6


def _fail_to_write(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> dict[str, Any]:
    """Three saves that rank 1 cannot write."""
    worker, found = _worker(rank, address, config), {}

    def disk_is_full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    if rank == 1:
        saver.write_items = disk_is_full
    _save(worker, root, 1)
    # Ranks learn of the failure at different times: in a phase that needs all of them none may raise it.
    for _ in range(2):
        _step(worker)
    _poll_to_the_end(worker)
    with pytest.raises(CheckpointError) as raised:
        worker.finalize_checkpoint()
    found["poll"] = str(raised.value)
    _save(worker, root, 2)
    with pytest.raises(CheckpointError) as raised:
        worker.finalize_checkpoint()
    found["finalize"] = str(raised.value)
    _save(worker, root, 3)
    return {**found, "verdict": worker.teardown(), "threads": _threads()}


def test_a_failed_writer_fails_loudly_on_every_rank_and_at_teardown_in_every_verdict(address, config, tmp_path) -> None:
    said = "training rank 1: OSError: [Errno 28] No space left on device: make room there"
    for found in values(run_ranks(_fail_to_write, SIZE, address, config, tmp_path)):
        assert found["poll"].endswith(f"global_step_1.incomplete failed: {said}")
        assert found["finalize"].endswith(f"global_step_2.incomplete failed: {said}")
        assert found["verdict"].keys() == {0, 1}
        assert all(said in verdict for verdict in found["verdict"].values())
        assert found["threads"] == []
    assert complete_checkpoints(tmp_path) == []


def _fail_during_a_save(rank: int, address: StoreAddress, config: RunConfig, root: Path, failing: int) -> Any:
    worker = _worker(rank, address, config)
    if rank == failing:
        HeldWriter()
    _save(worker, root, 1)
    return worker.teardown("out of memory" if rank == failing else None)


@pytest.mark.parametrize("failing", range(SIZE))
def test_a_rank_that_failed_keeps_nobody_waiting_for_its_part_of_a_save(
    failing: int, address, seeded_models, tmp_path
) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    config.rl_safe.checkpoint.async_save, config.rl_safe.timeouts.save = True, FOR_EVER_S
    for verdict in values(run_ranks(_fail_during_a_save, SIZE, address, config, tmp_path, failing, timeout_s=60)):
        assert verdict[failing] == "out of memory"
        assert f"training rank {failing}: out of memory" in verdict[1 - failing]
    assert complete_checkpoints(tmp_path) == []


def _lose_the_store(rank: int, config: RunConfig, root: Path) -> dict[int, str]:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(exchange_address(worker, root / "address"))
    worker.convert()
    _save(worker, root, 1)
    if rank == 0:
        os._exit(1)
    with pytest.raises(CommunicatorError, match="lost the run's store: its owner, training rank 0, has ended"):
        _poll_to_the_end(worker)
    return worker.teardown()


def test_the_end_of_the_stores_owner_during_a_save_is_one_of_our_errors(config, tmp_path) -> None:
    _, other = run_ranks(_lose_the_store, SIZE, config, tmp_path)
    assert list(values([other])[0]) == [0]
