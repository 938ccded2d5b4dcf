"""Runs one rank of the cycles of ms-swift's groups: ``python -m benchmarks.swift_cycles RANK RANKS PORT CYCLES``.

Each cycle makes the default group and ms-swift's groups through our adapter, connects them, and ends them in order.
It prints a line of JSON for each cycle.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from mcore_bridge.bridge import gpt_bridge
from swift.megatron.utils import megatron_lm_utils

from rl_safe_workers.adapters.swift.job import SwiftJob
from rl_safe_workers.adapters.swift.swift_settings import job_settings
from rl_safe_workers.platforms.device_memory import outside_torch

ARGUMENTS: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "ddp_timeout": 18_000_000,
    "use_distributed_optimizer": True,
    "moe_token_dispatcher_type": "alltoall",
    "model_info": SimpleNamespace(is_moe_model=True),
}
"""The arguments of ms-swift that decide about groups, for a job with expert parallelism."""


def cycles(rank: int, ranks: int, port: int, count: int) -> Iterator[dict[str, float]]:
    """Runs all cycles; yields the seconds and bytes of each."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    memory = outside_torch(device) or (lambda: 0)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    for number in range(count):
        job, started_s = SwiftJob(job_settings()), time.perf_counter()
        own = dist.PrefixStore(f"cycle{number}", store)
        job.creating_world(dist.init_process_group)(backend, store=own, rank=rank, world_size=ranks)
        job.creating_groups(megatron_lm_utils._initialize_mpu)(SimpleNamespace(**ARGUMENTS, ddp_backend=backend))
        report = job.trainer.comms.report
        assert report is not None, "the bootstrap has run"
        up_s, held = time.perf_counter() - started_s, memory()
        started_s = time.perf_counter()
        job.leave()
        down_s = time.perf_counter() - started_s
        assert not dist.is_initialized(), "nothing is left of the groups"
        # A new process would import mcore-bridge again, without this group.
        gpt_bridge.EP_PP_GROUP = None
        yield {"up_s": up_s, "down_s": down_s, "groups": report.groups, "held": held, "kept": memory()}


if __name__ == "__main__":
    for figures in cycles(*map(int, sys.argv[1:])):
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()
