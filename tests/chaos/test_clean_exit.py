"""Ranks whose run went well end together, soon, every time: eight of them, in two dozen groups."""

from __future__ import annotations

import atexit
import gc
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.config import RunConfig
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config, served_store

RANKS, MORE_GROUPS, SOON_S = 8, 8, 5.0
"""Later versions of Megatron make more groups than the one that is tested here, some 24."""


def _end(rank: int, address: StoreAddress, config: RunConfig) -> float:
    """Connects every group, ends, and does what an interpreter does at its end; returns when it began to."""
    worker = Worker(config, rank=rank, size=RANKS)
    worker.start(address)
    for _ in range(MORE_GROUPS):
        dist.new_group(range(RANKS))
    assert len(c10d._world.pg_map) >= 24
    began_s = time.monotonic()
    assert worker.teardown() == {}
    assert not c10d._world.pg_map
    atexit._run_exitfuncs()
    gc.collect()
    return began_s


@pytest.mark.parametrize("times", [1, pytest.param(100, marks=[pytest.mark.chaos, pytest.mark.timeout(1200)])])
def test_eight_ranks_of_a_pipeline_of_four_end_together(times: int) -> None:
    config = run_config(Path("unused"), pp=4, ep=2)
    for _ in range(times):
        with served_store() as address:
            began_s = values(run_ranks(_end, RANKS, address, config))
            ended_s = time.monotonic()
        assert ended_s - max(began_s) <= SOON_S
