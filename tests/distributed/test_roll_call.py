"""Roll calls over a real store: everyone is waited for, and who does not come is named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from rl_safe_workers.errors import Awaited, CommunicatorError, PhaseTimeoutError, StoreLostError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id, trainer_ids
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.roll_call import RollCall
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, exchange_address, run_config

SIZE, PATIENCE = 3, timedelta(seconds=1)


def _roll_call(rank: int, address: StoreAddress, *, world: str = "training world") -> RollCall:
    store = connect_store(address, timeout=timedelta(seconds=30))
    return RollCall(store, world=world, group_rank=rank, members=trainer_ids(range(SIZE)))


def _arrive_late(rank: int, address: StoreAddress, late_s: float, patience: timedelta) -> tuple[float, float]:
    roll_call = _roll_call(rank, address)
    time.sleep(late_s if rank == 1 else 0)
    came = time.monotonic()
    roll_call.arrive(Phase.SAVE, timeout=patience)
    return came, time.monotonic()


def test_nobody_goes_on_before_the_last_rank_has_come(address: StoreAddress) -> None:
    times = values(run_ranks(_arrive_late, SIZE, address, 0.5, timedelta(seconds=20)))
    last_came = max(came for came, _ in times)
    assert last_came - min(came for came, _ in times) > 0.3
    assert all(went_on >= last_came for _, went_on in times)


def test_a_missing_rank_is_named_with_the_phase_the_world_the_wait_and_the_setting(address: StoreAddress) -> None:
    present = run_ranks(_arrive_late, SIZE, address, 0, PATIENCE, ranks=[0, 2])
    for error in [outcome.error for outcome in present]:
        assert isinstance(error, PhaseTimeoutError)
        assert (error.phase, error.awaited, error.missing) == (
            "save",
            Awaited("training world", frozenset(trainer_ids(range(SIZE)))),
            {trainer_id(1)},
        )
        assert 1.0 <= error.waited_s < 5.0
        assert str(error) == (
            f"phase save: rank 1 of training world did not arrive within {error.waited_s:.1f} s; "
            "to wait longer raise rl_safe.timeouts.save"
        )


def test_a_rank_that_comes_after_the_deadline_was_missing(address: StoreAddress) -> None:
    early = run_ranks(_arrive_late, SIZE, address, 2, PATIENCE)[0]
    assert isinstance(early.error, PhaseTimeoutError)
    assert early.error.missing == {trainer_id(1)}


def _sequence(rank: int, address: StoreAddress, calls: dict[int, list[tuple[str, Phase]]]) -> None:
    store_calls = {world: _roll_call(rank, address, world=world) for world in ("training world", "other world")}
    for world, phase in calls[rank]:
        store_calls[world].arrive(phase, timeout=PATIENCE)


def _missing(address: StoreAddress, calls: dict[int, list[tuple[str, Phase]]]) -> list[tuple[int, ...] | None]:
    """What each rank misses, by rank; None where it does not fail."""
    errors = [outcome.error for outcome in run_ranks(_sequence, SIZE, address, calls)]
    assert all(error is None or isinstance(error, PhaseTimeoutError) for error in errors), errors
    return [None if error is None else tuple(one.rank for one in sorted(error.missing)) for error in errors]


def test_repeated_calls_of_a_phase_are_told_apart(address: StoreAddress) -> None:
    train = ("training world", Phase.TRAIN)
    assert _missing(address, {0: [train] * 3, 1: [train] * 2, 2: [train] * 3}) == [(1,), None, (1,)]


def test_phases_are_counted_apart(address: StoreAddress) -> None:
    train, save = ("training world", Phase.TRAIN), ("training world", Phase.SAVE)
    assert _missing(address, {0: [save], 1: [save], 2: [train]}) == [(2,), (2,), (0, 1)]


def test_worlds_on_one_store_do_not_answer_for_each_other(address: StoreAddress) -> None:
    here, there = ("training world", Phase.TRAIN), ("other world", Phase.TRAIN)
    assert _missing(address, {0: [here], 1: [here], 2: [there]}) == [(2,), (2,), (0, 1)]


def _outlive_the_store(rank: int, file: Path, then: Callable[[Worker], None]) -> None:
    worker = Worker(run_config(file), rank=rank, size=2)
    worker.init_world(exchange_address(worker, file), backend="gloo")
    has_begun = file.with_name("has_begun")
    if rank == 0:
        while not has_begun.exists():
            time.sleep(0.01)
        os._exit(1)
    has_begun.touch()
    time.sleep(0.5)
    then(worker)


def _enter_a_phase(worker: Worker) -> None:
    worker.init_groups(seed=0)


def test_a_rank_that_has_lost_the_store_says_whose_it_was(tmp_path: Path) -> None:
    error = run_ranks(_outlive_the_store, 2, tmp_path / "address", _enter_a_phase)[1].error
    assert type(error) is StoreLostError
    assert (
        "phase groups: rank 1 of training world has lost the run's store: its owner, training rank 0, has ended"
        in str(error)
    )


def _connect(rank: int, address: StoreAddress) -> None:
    connect_store(address, timeout=PATIENCE)


def test_a_store_that_is_not_there_is_named() -> None:
    error = run_ranks(_connect, 1, StoreAddress(host="127.0.0.1", port=1))[0].error
    assert type(error) is CommunicatorError
    assert "no store at 127.0.0.1:1 within 1 s" in str(error)
