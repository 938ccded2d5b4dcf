"""Runs one rank of the benchmark ``exits``: ``python -m benchmarks.exits_ranks RANK JOBS``.

Every job runs in a fork of this process, which waits for the fork's end.
"""

from __future__ import annotations

import atexit
import gc
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.comms_peers import every_group
from benchmarks.forks import in_a_fork
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.recipe import load_recipe
from rl_safe_workers.trainer.trainer_worker import TrainerWorker
from rl_safe_workers.worlds.address import StoreAddress

OURS, EVERY, EVERY_TORCH = "ours", "every group", "every group, torch's end"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One life of all ranks.

    Example: ``Job(way="ours", recipe="recipes/quickstart_gpu.yaml", overrides=[], port=4711, secret="…")``
    """

    way: str
    """`OURS`: our bootstrap and our end. `EVERY`: all of Megatron's groups warmed up without limits, and our end.
    `EVERY_TORCH`: the same, but ended by ``destroy_model_parallel`` and ``destroy_process_group``."""
    recipe: str
    overrides: list[str]
    port: int
    secret: str
    """Secret of the store, in hexadecimal digits."""


def live_and_end(job: Job, rank: int) -> dict[str, float]:
    """Builds everything, then ends it; returns the start of the end as ``began_at``, in Unix seconds."""
    limits = [] if job.way == OURS else ["rl_safe.bootstrap.budget=false"]
    config = load_recipe(job.recipe, [*job.overrides, *limits])
    worker = TrainerWorker(config, training_rank=rank)
    worker.start(time.time())
    worker.enter_world(StoreAddress(host="127.0.0.1", port=job.port, secret=bytes.fromhex(job.secret)))
    worker.groups()
    worker.bootstrap()
    if job.way != OURS:
        with worker.phase(Phase.BOOTSTRAP):
            every_group(worker.device)
    worker.convert()
    dist.barrier()
    began_at = time.time()
    if job.way == EVERY_TORCH:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    else:
        worker.teardown()
    # An interpreter does this at its end. A fork would skip it.
    atexit._run_exitfuncs()
    gc.collect()
    return {"began_at": began_at}


def main() -> None:
    """Runs this rank's part of all jobs, and writes ``<number>_<rank>.json`` beside their file."""
    rank, jobs_file = int(sys.argv[1]), Path(sys.argv[2])
    for number, fields in enumerate(json.loads(jobs_file.read_text(encoding="utf-8"))):
        result = jobs_file.with_name(f"{number}_{rank}.json")
        is_well = in_a_fork(partial(live_and_end, Job(**fields), rank), result)
        ended_at = time.time()
        if not is_well:
            sys.exit(1)
        result.write_text(
            json.dumps(json.loads(result.read_text(encoding="utf-8")) | {"ended_at": ended_at}), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
