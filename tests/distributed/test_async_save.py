"""Saves that are written while training goes on: what they hold, who waits for them, and what a failure comes to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.checkpoint.audit import audit
from rl_safe_workers.checkpoint.folders.manifest import complete_checkpoints
from rl_safe_workers.checkpoint.save import saver
from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import CheckpointError, CommunicatorError
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.held_saves import (
    FOR_EVER_S,
    SIZE,
    HeldWriter,
    live_and_save,
    of_ranks,
    poll_to_the_end,
    save_held,
    saving_worker,
    threads_of,
    train_step,
)
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, exchange_address, run_config, served_store


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
        return values(run_ranks(live_and_save, SIZE, address, config, root)), root


def test_a_save_returns_before_its_checkpoint_exists_and_a_poll_does_not_wait_for_it(lives) -> None:
    assert of_ranks(lives, "exists at once") == [False] * SIZE
    assert of_ranks(lives, "polls") == [[True] * 3] * SIZE


@pytest.mark.parametrize("wait", ["offload", "the next save", "load", "finalize", "teardown"])
def test_what_a_save_must_not_reach_into_finishes_it_first(lives, wait: str) -> None:
    assert of_ranks(lives, wait) == [(False, True)] * SIZE


def test_a_training_step_during_a_save_is_not_in_it(lives) -> None:
    assert of_ranks(lives, "moved") == [True] * SIZE
    assert of_ranks(lives, "comes back") == [True] * SIZE


def test_at_most_one_save_is_written_at_a_time_and_no_thread_is_left(lives) -> None:
    assert of_ranks(lives, "most at once") == [1] * SIZE
    assert of_ranks(lives, "threads") == [[]] * SIZE


def test_all_are_well_and_every_checkpoint_passes_the_audit(lives) -> None:
    assert of_ranks(lives, "result of teardown") == [{}] * SIZE
    assert of_ranks(lives, "result of finalize") == [lives[1] / "global_step_4"] * SIZE
    found = complete_checkpoints(lives[1])
    assert sorted(manifest.step for _, manifest in found) == [1, 2, 3, 4, 5, 10]
    assert all(manifest.driver_state == {"step": manifest.step} for _, manifest in found)
    assert [audit(path, deep=True).problems for path, _ in found] == [()] * 6


def _fail_to_write(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> dict[str, Any]:
    """Three saves that rank 1 cannot write."""
    worker, found = saving_worker(rank, address, config), {}

    def disk_is_full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    if rank == 1:
        saver.write_items = disk_is_full
    save_held(worker, root, 1)
    # Ranks learn of the failure at different times: in a phase that needs all of them none may raise it.
    for _ in range(2):
        train_step(worker)
    poll_to_the_end(worker)
    with pytest.raises(CheckpointError) as raised:
        worker.finalize_checkpoint()
    found["poll"] = str(raised.value)
    save_held(worker, root, 2)
    with pytest.raises(CheckpointError) as raised:
        worker.finalize_checkpoint()
    found["finalize"] = str(raised.value)
    save_held(worker, root, 3)
    return {**found, "verdict": worker.teardown(), "threads": threads_of()}


def test_a_failed_writer_fails_loudly_on_every_rank_and_at_teardown_in_every_verdict(address, config, tmp_path) -> None:
    said = "training rank 1: OSError: [Errno 28] No space left on device: free some space on its disk"
    for found in values(run_ranks(_fail_to_write, SIZE, address, config, tmp_path)):
        assert found["poll"].endswith(f"global_step_1.incomplete failed: {said}")
        assert found["finalize"].endswith(f"global_step_2.incomplete failed: {said}")
        assert found["verdict"].keys() == {0, 1}
        assert all(said in verdict for verdict in found["verdict"].values())
        assert found["threads"] == []
    assert complete_checkpoints(tmp_path) == []


def _fail_during_a_save(rank: int, address: StoreAddress, config: RunConfig, root: Path, failing: int) -> Any:
    worker = saving_worker(rank, address, config)
    if rank == failing:
        HeldWriter()
    save_held(worker, root, 1)
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
    save_held(worker, root, 1)
    if rank == 0:
        os._exit(1)
    with pytest.raises(CommunicatorError, match="lost the run's store: its owner, training rank 0, has ended"):
        poll_to_the_end(worker)
    return worker.teardown()


def test_the_end_of_the_stores_owner_during_a_save_is_one_of_our_errors(config, tmp_path) -> None:
    _, other = run_ranks(_lose_the_store, SIZE, config, tmp_path)
    assert list(values([other])[0]) == [0]
