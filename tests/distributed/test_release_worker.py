"""Workers whose communicators are released with the offload go on with the groups that they hold, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.comms.releasable import register_backend
from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config, served_store

SIZE, CYCLES = 4, 3
LAYOUTS = {"ep2": {"ep": 2}, "tp2_ep2": {"tp": 2, "ep": 2}, "pp2_ep2": {"pp": 2, "ep": 2}}


def _train(rank: int, address: StoreAddress, config: RunConfig, releases: bool, root: Path) -> dict[str, Any]:
    # Part of the state, and new in every process.
    random.seed(0)
    np.random.seed(0)
    worker = Worker(config, rank=rank, size=SIZE)
    worker.safe.offloader.releases_comms = releases
    worker.init_world(address, backend=register_backend("gloo") if releases else "gloo")
    worker.init_groups(seed=0)
    worker.bootstrap()
    worker.convert()
    group, refused, losses = parallel_state.get_data_parallel_group(with_context_parallel=True), [], []
    for step in range(CYCLES):
        losses.append(worker.step(reference.random_batch(rows=8, seed=step))["grad_norm"])
        worker.offload()
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except CommunicatorError as error:
            refused.append(str(error))
        worker.onload()
    worker.save_checkpoint(root, step=1, fingerprint="", layout={}, driver_state={})
    found = {"losses": losses, "digest": worker.digest(), "refused": refused}
    worker.teardown()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_releases_is_bit_for_bit_one_that_never_does(layout, seeded_models, tmp_path) -> None:
    config = run_config(seeded_models["moe"], **LAYOUTS[layout])
    found = []
    for releases in (False, True):
        with served_store() as address:
            ranks = run_ranks(_train, SIZE, address, config, releases, tmp_path / str(releases), timeout_s=60)
        found.append(values(ranks))
    never, always = found
    for one, other in zip(never, always, strict=True):
        assert other["losses"] == one["losses"]
        assert other["digest"] == one["digest"]
        assert one["refused"] == []
        assert len(other["refused"]) == CYCLES
        assert "onload()" in other["refused"][0]
