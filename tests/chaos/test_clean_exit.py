"""Ranks whose run went well end together every time, and never by a timeout: eight of them, in two dozen groups."""

from __future__ import annotations

import atexit
import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.config import RunConfig
from rl_safe_workers.worlds.address import StoreAddress
from tests.chaos.conftest import NOTE
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config, served_store

RANKS, MORE_GROUPS = 8, 8
"""Later versions of Megatron make more groups than the one that is tested here, some 24."""
SOON_S = 30.0
"""Half of the teardown's timeout here. An end that is not coordinated waits for the whole of it."""


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


def _slowest_end_s(times: int) -> float:
    """The longest that the ranks have taken from the moment that all had begun to end."""
    config, slowest_s = run_config(Path("unused"), pp=4, ep=2), 0.0
    for _ in range(times):
        with served_store() as address:
            began_s = values(run_ranks(_end, RANKS, address, config))
            slowest_s = max(slowest_s, time.monotonic() - max(began_s))
    return slowest_s


def test_eight_ranks_of_a_pipeline_of_four_end_together() -> None:
    assert _slowest_end_s(1) <= SOON_S


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_they_do_a_hundred_times(record_property: Callable[[str, object], None]) -> None:
    slowest_s = _slowest_end_s(100)
    assert slowest_s <= SOON_S
    record_property(NOTE, f"Eight ranks in 24 groups (PP4 EP2) ended together 100 times, in at most {slowest_s:.1f} s.")
