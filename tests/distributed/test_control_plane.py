"""The control plane among processes: a rank that dies, a store that ends, and a store that was never there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.control.seal import new_secret
from rl_safe_workers.errors import CommunicatorError, PhaseTimeoutError, StoreLostError
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, control_plane, exchange_address, run_config

SIZE, PATIENCE_S = 3, 1.0


def _barrier(plane: ControlPlane) -> Any:
    plane.barrier("save", Deadline.after(PATIENCE_S))


def _decide(plane: ControlPlane) -> Any:
    return plane.gathering("vote", phase="save").settle(Deadline.after(PATIENCE_S))


def _verdicts(plane: ControlPlane) -> Any:
    return plane.exchange_outcomes(None, phase="save", deadline=Deadline.after(PATIENCE_S))


def _die_in_the_second(rank: int, address: StoreAddress, call: Callable[[ControlPlane], Any], dying: int) -> Any:
    plane = control_plane(address, rank=rank, size=SIZE)
    plane.barrier("world", Deadline.after(30))
    if rank == dying:
        os._exit(1)
    return call(plane)


@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("call", [_barrier, _decide])
def test_a_rank_that_dies_is_named_by_the_others(
    call: Callable[[ControlPlane], Any], dying: int, address: StoreAddress
) -> None:
    outcomes = run_ranks(_die_in_the_second, SIZE, address, call, dying)
    for error in [outcome.error for outcome in outcomes if outcome.rank != dying]:
        assert isinstance(error, PhaseTimeoutError)
        assert error.missing == {trainer_id(dying)}
        assert PATIENCE_S <= error.waited_s < PATIENCE_S + 4


def test_a_rank_that_dies_has_given_no_verdict(address: StoreAddress) -> None:
    zero, _, two = run_ranks(_die_in_the_second, SIZE, address, _verdicts, 1)
    assert values([zero, two]) == [{1: "did not report in time"}] * 2


def _outlive_the_store(rank: int, file: Path, call: Callable[[Worker], Any]) -> Any:
    worker = Worker(run_config(file), rank=rank, size=2)
    worker.init_world(exchange_address(worker, file), backend="gloo")
    has_begun = file.with_name("has_begun")
    if rank == 0:
        while not has_begun.exists():
            time.sleep(0.01)
        os._exit(1)
    has_begun.touch()
    time.sleep(0.5)
    return call(worker)


def _enter_a_phase(worker: Worker) -> None:
    worker.init_groups(seed=0)


def test_a_rank_that_has_lost_the_store_says_whose_it_was(tmp_path: Path) -> None:
    error = run_ranks(_outlive_the_store, 2, tmp_path / "address", _enter_a_phase)[1].error
    assert isinstance(error, StoreLostError)
    assert (
        "phase groups: rank 1 of training world has lost the run's store: its owner, training rank 0, has ended"
        in str(error)
    )


def _connect(rank: int, address: StoreAddress) -> None:
    connect_store(address, timeout=timedelta(seconds=1))


def test_a_store_that_is_not_there_is_named() -> None:
    error = run_ranks(_connect, 1, StoreAddress(host="127.0.0.1", port=1, secret=new_secret()))[0].error
    assert isinstance(error, CommunicatorError)
    assert "no store at 127.0.0.1:1 within 1 s" in str(error)
