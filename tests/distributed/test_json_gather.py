"""Plain values gathered from all ranks: they arrive as JSON, and nothing that arrives is run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_safe_workers.comms import json_gather
from rl_safe_workers.comms.json_gather import gather_json
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import served_store

SIZE = 3
PATIENCE = timedelta(seconds=30)


def _world(rank: int, address: StoreAddress, backend: str = "gloo") -> dist.ProcessGroup:
    store = connect_store(address, timeout=PATIENCE)
    dist.init_process_group(backend, store=store, rank=rank, world_size=SIZE, timeout=PATIENCE)
    world = dist.group.WORLD
    assert world is not None
    return world


def _gather(rank: int, address: StoreAddress, backend: str) -> list[Any]:
    return gather_json({"rank": rank, "names": ["é" * rank], "none": None}, group=_world(rank, address, backend))


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:gloo"])
def test_every_rank_has_the_values_of_all_by_rank(backend: str) -> None:
    expected = [{"rank": rank, "names": ["é" * rank], "none": None} for rank in range(SIZE)]
    with served_store() as address:
        assert values(run_ranks(_gather, SIZE, address, backend)) == [expected] * SIZE


class Runs:
    """Pickles as a call of the shell."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.mark}",)


class PickleJson:
    """Sends a pickle where JSON is expected."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def dumps(self, value: Any) -> Any:
        return pickle.dumps(Runs(self._mark)).decode("latin-1")

    def loads(self, data: bytes) -> Any:
        raise ValueError


def _gather_hostile(rank: int, address: StoreAddress, mark: Path) -> None:
    world = _world(rank, address)
    if rank == 1:
        json_gather.json = PickleJson(mark)  # type: ignore[assignment]
    gather_json(rank, group=world)


def test_a_pickle_from_another_rank_is_refused_and_not_run(tmp_path: Path) -> None:
    with served_store() as address:
        outcomes = run_ranks(_gather_hostile, SIZE, address, tmp_path / "ran")
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, CommunicatorError), outcomes[rank].trace
        assert "group rank 1 sent what is not JSON" in str(outcomes[rank].error)
    assert not (tmp_path / "ran").exists()


def _gather_too_much(rank: int, address: StoreAddress) -> None:
    world = _world(rank, address)
    if rank == 2:
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(SIZE)]
        dist.all_gather(lengths, torch.tensor([2**50]), group=world)
        return
    gather_json(rank, group=world)


def test_a_rank_that_announces_too_much_is_refused() -> None:
    with served_store() as address:
        outcomes = run_ranks(_gather_too_much, SIZE, address)
    for rank in (0, 1):
        assert isinstance(outcomes[rank].error, CommunicatorError), outcomes[rank].trace
        assert str(2**50) in str(outcomes[rank].error)
