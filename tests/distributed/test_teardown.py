"""The end of a training world: agreed on by all, bounded in time, and without any collective if someone failed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import CommunicatorError, LifecycleError, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.workers import safe_trainer
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.training_rank import Part
from tests.distributed.ranks import run_ranks, values
from tests.distributed.recording import recorded_collectives
from tests.distributed.worker import Worker, exchange_address, run_config

SIZE, TEARDOWN_S = 4, 2.0


@pytest.fixture
def config(seeded_models) -> RunConfig:
    config = run_config(seeded_models["moe"], ep=2)
    config.rl_safe.timeouts.teardown = TEARDOWN_S
    return config


def _end(worker: Worker, failure: str | None = None) -> dict[str, Any]:
    start_s = time.monotonic()
    with recorded_collectives() as collectives:
        failed = worker.teardown(failure)
    return {
        "failed": failed,
        "took_s": time.monotonic() - start_s,
        "collectives": len(collectives),
        "initialised": (dist.is_initialized(), parallel_state.is_initialized()),
        "groups": len(c10d._world.pg_map),
    }


def _all_well(rank: int, address: StoreAddress, config: RunConfig) -> list[dict[str, Any]]:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    worker.join(SIZE)
    ends = [_end(worker), _end(worker)]
    assert worker.safe.weights.joint_group is None
    return ends


def test_all_well_destroys_every_group_and_a_second_time_does_nothing(address, config) -> None:
    for first, second in values(run_ranks(_all_well, SIZE, address, config)):
        assert first["failed"] == second["failed"] == {}
        assert first["initialised"] == second["initialised"] == (False, False)
        assert first["groups"] == 0
        assert second["took_s"] < 0.1


def _after_teardown(rank: int, address: StoreAddress, config: RunConfig) -> str:
    worker = Worker(config, rank=rank, size=2)
    worker.start(address)
    worker.teardown()
    try:
        worker.bootstrap()
    except LifecycleError as error:
        return str(error)
    return ""


def test_nothing_is_entered_after_a_teardown(address, config) -> None:
    for message in values(run_ranks(_after_teardown, 2, address, config)):
        assert "cannot enter phase bootstrap after teardown" in message


def _set_up_partly(rank: int, address: StoreAddress, config: RunConfig, calls: int) -> dict[str, Any]:
    worker = Worker(config, rank=rank, size=2)
    steps: list[Callable[[], Any]] = [
        lambda: worker.init_world(address, backend="gloo"),
        lambda: worker.init_groups(seed=0),
        worker.bootstrap,
    ]
    for step in steps[:calls]:
        step()
    return _end(worker)


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_a_partial_set_up_can_be_torn_down(calls: int, address, config) -> None:
    for end in values(run_ranks(_set_up_partly, 2, address, config, calls)):
        assert end["failed"] == {}
        assert end["initialised"] == (False, False)
        assert end["groups"] == 0


def _one_failed(rank: int, address: StoreAddress, config: RunConfig) -> list[dict[str, Any]]:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    return [_end(worker, "out of memory" if rank == 2 else None), _end(worker)]


def test_after_a_failure_everyone_knows_it_and_no_group_is_touched(address, config) -> None:
    for first, second in values(run_ranks(_one_failed, SIZE, address, config)):
        assert first["failed"] == second["failed"] == {2: "out of memory"}
        assert first["collectives"] == second["collectives"] == 0
        assert first["initialised"] == second["initialised"] == (True, True)
        assert max(first["took_s"], second["took_s"]) < TEARDOWN_S / 2


def _destruction_fails(rank: int, address: StoreAddress, config: RunConfig) -> list[dict[int, str]]:
    worker = Worker(config, rank=rank, size=2)
    worker.start(address)

    def destroy(*args: Any, **kwargs: Any) -> NoReturn:
        raise CommunicatorError("the groups were aborted, not destroyed")

    safe_trainer.destroy_groups = destroy
    with pytest.raises(CommunicatorError):
        worker.teardown()
    return [worker.teardown()]


def test_after_groups_that_could_not_be_destroyed_no_rank_says_that_all_were_well(address, config) -> None:
    for rank, (verdict,) in enumerate(values(run_ranks(_destruction_fails, 2, address, config))):
        assert verdict == {rank: "the groups were aborted, not destroyed"}


def _failed_before_the_world(rank: int, address: StoreAddress, config: RunConfig) -> list[dict[int, str]]:
    worker = Worker(config, rank=rank, size=2)
    return [worker.teardown("out of memory"), worker.teardown()]


def test_a_failure_before_there_is_a_world_is_not_dropped(address, config) -> None:
    for rank, verdicts in enumerate(values(run_ranks(_failed_before_the_world, 2, address, config))):
        assert verdicts == [{rank: "out of memory"}] * 2


class _FullDisk(Part):
    """A part that ends its work, or gives it up, on a disk that is full."""

    def before(self, phase: Phase) -> None:
        if phase is Phase.TEARDOWN:
            raise OSError(28, "No space left on device")

    def abort(self, reason: str) -> None:
        raise OSError(28, "No space left on device")


def _one_has_a_full_disk(
    rank: int, address: StoreAddress, config: RunConfig, failure: str | None
) -> list[dict[str, Any]]:
    worker = Worker(config, rank=rank, size=2)
    worker.start(address)
    if rank == 0:
        worker.safe.add_part(_FullDisk(worker.safe))
    return [_end(worker, failure if rank == 0 else None)]


@pytest.mark.parametrize("failure", [None, "out of memory"])
def test_a_part_that_cannot_end_its_work_fails_its_rank_and_nobody_waits(failure: str | None, address, config) -> None:
    for (end,) in values(run_ranks(_one_has_a_full_disk, 2, address, config, failure)):
        assert end["failed"] == {0: failure or "OSError: [Errno 28] No space left on device"}
        assert end["took_s"] < TEARDOWN_S / 2


def _one_is_silent(rank: int, address: StoreAddress, config: RunConfig) -> dict[str, Any]:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    if rank == 3:
        time.sleep(TEARDOWN_S + 2)
        return {}
    return _end(worker)


def test_a_rank_without_a_verdict_counts_as_failed_once_the_time_is_up(address, config) -> None:
    *others, _silent = values(run_ranks(_one_is_silent, SIZE, address, config))
    for end in others:
        assert end["failed"] == {3: "did not report in time"}
        assert end["collectives"] == 0
        assert TEARDOWN_S <= end["took_s"] < TEARDOWN_S + 1


def _one_dies_after_its_verdict(
    rank: int, address: StoreAddress, config: RunConfig
) -> tuple[PhaseTimeoutError, dict[int, str], list[bool]]:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    if rank == 1:
        worker.safe.control.barrier = lambda *args, **kwargs: os._exit(1)
    aborted: list[bool] = []
    safe_trainer.abort_groups = lambda *args, **kwargs: aborted.append(True)
    with pytest.raises(PhaseTimeoutError) as raised:
        worker.teardown()
    return raised.value, worker.teardown(), aborted


def test_a_rank_that_dies_after_its_verdict_is_named_and_the_others_abort(address, config) -> None:
    outcomes = run_ranks(_one_dies_after_its_verdict, SIZE, address, config)
    for outcome in [outcome for outcome in outcomes if outcome.rank != 1]:
        error, verdict, aborted = values([outcome])[0]
        assert error.missing == {trainer_id(1)}
        assert error.waited_s < TEARDOWN_S + 1
        assert verdict == {outcome.rank: str(error)}
        assert aborted == [True]


def _owning(rank: int, end: Callable[[int, Worker], Any], config: RunConfig, file: Path) -> Any:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.init_world(exchange_address(worker, file), backend="gloo")
    worker.init_groups(seed=0)
    return end(rank, worker)


def _dawdle_in_destruction(seconds: float) -> list[float]:
    """Returns a list that gets the time at which this rank went on."""
    destroy, went_on_s = safe_trainer.destroy_groups, []

    def destroy_slowly(world: Any, **kwargs: Any) -> None:
        time.sleep(seconds)
        went_on_s.append(time.monotonic())
        destroy(world, **kwargs)

    safe_trainer.destroy_groups = destroy_slowly
    return went_on_s


def _another_is_slow(rank: int, worker: Worker) -> tuple[float, float]:
    went_on_s = _dawdle_in_destruction(1.0 if rank == 3 else 0)
    assert worker.teardown() == {}
    return went_on_s[0], time.monotonic()


def _owner_is_slow_and_then_in_a_hurry(rank: int, worker: Worker) -> dict[int, str]:
    _dawdle_in_destruction(0.5 if rank == 0 else 0)
    failed = worker.teardown()
    if rank == 0:
        os._exit(0)
    return failed


def _owner_is_gone(rank: int, worker: Worker) -> dict[str, Any]:
    store = worker.safe.store
    if rank == 0:
        store.wait([f"has groups {other}" for other in range(1, SIZE)])
        os._exit(1)
    store.set(f"has groups {rank}", "")
    time.sleep(0.5)
    return _end(worker)


def test_only_the_owner_of_the_store_waits_for_the_slowest(config, tmp_path) -> None:
    ranks = values(run_ranks(_owning, SIZE, _another_is_slow, config, tmp_path / "address"))
    slowest_went_on_s = ranks[3][0]
    left_s = [left for _, left in ranks]
    assert left_s[0] > slowest_went_on_s
    assert max(left_s[1:3]) < slowest_went_on_s


def test_nobody_else_needs_the_store_once_its_owner_may_end(config, tmp_path) -> None:
    _, *others = run_ranks(_owning, SIZE, _owner_is_slow_and_then_in_a_hurry, config, tmp_path / "address")
    assert values(others) == [{}] * (SIZE - 1)


def test_a_store_that_is_gone_is_a_verdict_on_its_owner(config, tmp_path) -> None:
    _, *others = run_ranks(_owning, SIZE, _owner_is_gone, config, tmp_path / "address")
    for end in values(others):
        assert list(end["failed"]) == [0]
        assert "has ended" in end["failed"][0]
        assert end["took_s"] < TEARDOWN_S / 2
