"""Runs one rank of the benchmark ``comms``: ``python -m benchmarks.comms_ranks RANK JOBS``.

Every job runs in a fork of this process, which has imported everything but touched no device. So communicators end with
their job, and no job waits for imports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.comms import DROPS, OURS, RELEASES
from benchmarks.comms_peers import WARMUPS
from benchmarks.forks import run_jobs_of_rank
from benchmarks.taken import Taken
from rl_safe_workers.comms import nccl_suspend
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.platforms.cuda import make_deterministic
from rl_safe_workers.platforms.device_memory import outside_torch
from rl_safe_workers.recipe import load_recipe
from rl_safe_workers.trainer.batch import SequenceBatch
from rl_safe_workers.trainer.trainer_worker import TrainerWorker
from rl_safe_workers.worlds.address import StoreAddress

FIRST_STEPS = 3
TIMED_STEPS = {OURS: 30, "nothing": 30}
"""Number of timed steps by way. These ways differ only in the limits of communicators: the budget's or NCCL's own."""
CYCLES = 20
"""Number of cycles of a step, a release and a rebuild."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A layout with one way of warming up.

    Example: ``Job(warmup="every group", recipe="recipes/quickstart_gpu.yaml", overrides=[…], port=4711,
    secret="…", rows=8, tokens=512)``
    """

    warmup: str
    """`OURS`, `RELEASES`, `DROPS`, or one of `WARMUPS`."""
    recipe: str
    overrides: list[str]
    port: int
    secret: str
    """Secret of the store, in hexadecimal digits."""
    rows: int
    """Sequences of a step on each data-parallel rank."""
    tokens: int
    """Tokens of each sequence."""


def measure(job: Job, rank: int) -> dict[str, Any]:
    """Warms up, builds the model and trains; returns this rank's bytes, with their owners, and its seconds."""
    releasing = ["rollout.release_comms=always"]
    ways = {OURS: [], RELEASES: releasing, DROPS: releasing}
    if job.warmup == DROPS:
        nccl_suspend.why_not = lambda: "not wanted"
    settings = ways.get(job.warmup, ["rl_safe.bootstrap.budget=false"])
    # With updates this small, routing does not change, and each step does the same work.
    always = ["rl_safe.bootstrap.watch_steps=0", "actor.optim.lr=1e-6"]
    config = load_recipe(job.recipe, [*job.overrides, *settings, *always])
    worker = TrainerWorker(config, training_rank=rank)
    worker.start(time.time())
    if job.warmup in ways:
        make_deterministic()  # because the figures of steps are compared
    worker.enter_world(StoreAddress(host="127.0.0.1", port=job.port, secret=bytes.fromhex(job.secret)))
    worker.groups()
    torch.zeros(1, device=worker.device)  # CUDA now loads its fill kernel, which must not count as a communicator's
    synchronize(worker.device)
    taken, started_s, report = Taken(worker.device), time.perf_counter(), None
    if job.warmup in ways:
        report = worker.bootstrap()
        warm = report.bytes or 0
    else:
        with worker.phase(Phase.BOOTSTRAP), taken.attributed():
            WARMUPS[job.warmup](worker.device)
            synchronize(worker.device)
        warm, taken.by_collectives = taken.by_collectives, 0
    seconds = time.perf_counter() - started_s
    batch = _batch(job, rank)
    with taken.attributed():
        worker.convert()
        figures = [worker.train(batch, len(batch)) for _ in range(FIRST_STEPS)]
        synchronize(worker.device)
    growth, released = taken.growth(), {}
    if job.warmup in (RELEASES, DROPS):
        released = _release_and_rebuild(worker, batch, figures)
    elif job.warmup == OURS:
        figures += [worker.train(batch, len(batch)) for _ in range(CYCLES)]
    torch.use_deterministic_algorithms(mode=False)
    count = TIMED_STEPS.get(job.warmup, 1)
    steps = [timed(lambda: worker.train(batch, len(batch)), worker.device) for _ in range(count)]
    found = {
        **released,
        "warmup_s": seconds,
        "warm_bytes": warm,
        "late_bytes": taken.by_collectives,
        "growth_bytes": growth,
        "predicted_bytes": report.predicted_bytes if report else 0,
        "step_s": median(steps),
        "kernel_bytes": (report.kernel_bytes or 0) if report else 0,
        "by_group": dict(taken.by_group),
        "figures": figures,
        "ledger": [asdict(entry) for entry in report.entries] if report else [],
    }
    worker.teardown()
    return found


def _release_and_rebuild(worker: TrainerWorker, batch: SequenceBatch, figures: list[Any]) -> dict[str, float]:
    """Runs cycles of release, rebuild and step; returns the median's bytes and seconds, and growth since the second.

    Adds each step's figures to ``figures``.
    """
    freed, away, back, used = [], [], [], []
    probe = outside_torch(worker.device) or (lambda: 0)
    for _ in range(CYCLES):
        started_s = time.perf_counter()
        with worker.phase(Phase.OFFLOAD):
            freed.append(worker.safe.offloader.release_comms())
        away.append(time.perf_counter() - started_s)
        with worker.phase(Phase.ONLOAD):
            worker.safe.offloader.rebuild_comms()
        synchronize(worker.device)
        back.append(time.perf_counter() - started_s - away[-1])
        figures.append(worker.train(batch, len(batch)))
        used.append(probe())
    return {
        "freed_bytes": median(freed),
        "release_s": median(away),
        "rebuild_s": median(back),
        "cycle_s": median(map(sum, zip(away, back, strict=True))),
        "cycles_growth_bytes": used[-1] - used[1],
    }


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of work that all ranks begin together."""
    dist.barrier()
    synchronize(device)
    started_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started_s


def synchronize(device: torch.device) -> None:
    """Waits for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _batch(job: Job, rank: int) -> SequenceBatch:
    generator = np.random.default_rng(parallel_state.get_data_parallel_rank())
    shape = (job.rows, job.tokens)
    mask = np.zeros(shape, np.float32)
    mask[:, job.tokens // 4 :] = 1
    logprobs = np.full(shape, -4.8, np.float32) * mask
    return SequenceBatch(
        tokens=generator.integers(7, 100, shape),
        response_mask=mask,
        rollout_logprobs=logprobs,
        old_logprobs=logprobs,
        advantages=generator.standard_normal(shape[0]).astype(np.float32),
    )


if __name__ == "__main__":
    run_jobs_of_rank(lambda fields, rank: measure(Job(**fields), rank))
