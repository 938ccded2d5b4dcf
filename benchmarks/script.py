"""Compares memory and steps of a plain Megatron script, with and without `bootstrap` and `channel_limits`.

Needs two GPUs. The memory is from the rank that takes most. Steps are compared in blocks: two sets of ranks share the
GPUs, and one set waits while the other runs its block. ``RL_SAFE_BENCH_LAYERS=te`` uses Transformer Engine's layers,
and adds context parallelism and fp8. ``RL_SAFE_BENCH_LAYOUTS="EP2;CP2"`` runs only these layouts.

With ``RL_SAFE_BENCH_HOSTS=apart``, NCCL believes that each rank is on its own host. With ``two``, four ranks share the
two GPUs as two hosts of two ranks. In both cases no steps are compared.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.comms import EVERY, MIB, NOTHING, OURS, run_jobs
from benchmarks.gpu import HOSTS
from benchmarks.gpus import count_gpus, gpu_row
from benchmarks.table import Row, at_least, at_most
from rl_safe_workers.errors import ResourceError
from rl_safe_workers.worlds.store import serve_store

GPUS = 2
MODULE = "benchmarks.script_ranks"
UNLIMITED = "ours, without channel_limits"
WATCHED = "nothing but the watch"
"""The script without our functions, but with the threads that watch its ranks."""
WAYS = (NOTHING, EVERY, UNLIMITED, OURS)
IN_TURNS = (NOTHING, OURS)
"""Ways whose steps are compared."""
BLOCKS, BLOCK_STEPS = 10, 10
LAYERS = os.environ.get("RL_SAFE_BENCH_LAYERS", "local")
HIDDEN, TOKENS = 1024, 4096
JOB_S, TURNS_S = 90.0, 300.0
_STORE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout.

    Example: ``Layout(name="EP2", sizes={"expert_model_parallel_size": 2})``
    """

    name: str
    sizes: Mapping[str, int]
    features: Mapping[str, bool] = field(default_factory=dict)
    """Features in addition to those of every layout."""
    fp8: bool = False
    ranks: int = GPUS


_EP2 = {"expert_model_parallel_size": 2}
LAYOUTS = (
    Layout(name="EP2", sizes=_EP2),
    Layout(name="TP2 EP2", sizes={"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, **_EP2}),
    Layout(name="PP2", sizes={"pipeline_model_parallel_size": 2}, features={"batched_p2p": True}),
    Layout(name="EP2, async saves", sizes=_EP2, features={"background_saves": True}),
)
ENGINE_LAYOUTS = (
    *LAYOUTS[:-1],
    Layout(name="CP2", sizes={"context_parallel_size": 2}, features={"context_collectives": False}),
    Layout(name="EP2, fp8", sizes=_EP2, fp8=True),
)
_EP2_OF_4 = Layout(name="EP2, expert-DP 2", sizes=_EP2, ranks=4)
SHARING_LAYOUTS = (
    _EP2_OF_4,
    replace(_EP2_OF_4, name="EP2, 2 instances", sizes={**_EP2, "num_distributed_optimizer_instances": 2}),
    replace(
        _EP2_OF_4,
        name="PP2 EP2",
        sizes={**_EP2, "pipeline_model_parallel_size": 2},
        features={"batched_p2p": True},
    ),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A layout with one way of warming up.

    Example: ``Job(way="ours", sizes={"expert_model_parallel_size": 2}, features={"moe": True}, layers="local",
    fp8=False, port=4711, ranks=2, device="cuda", hidden=1024, tokens=512)``
    """

    way: str
    """One of `WAYS`."""
    sizes: dict[str, int]
    """Arguments of ``initialize_model_parallel``."""
    features: dict[str, bool]
    """Fields of `Features`, for our functions."""
    layers: str
    """``local`` for Megatron's layers, ``te`` for Transformer Engine's."""
    fp8: bool
    port: int
    """Port of the default group's store."""
    ranks: int
    device: str
    hidden: int
    tokens: int
    """Tokens of each sequence."""
    turns_port: int = 0
    """Port of a store over which two jobs take turns; 0 for a single job."""
    place: int = 0
    """The job's number among the two, 0 or 1."""
    blocks: int = 0
    """Number of timed blocks of each job."""
    block_steps: int = BLOCK_STEPS


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs every layout in every way. Takes about eight minutes.

    Raises:
        ResourceError: If there are fewer than two GPUs.
        RunError: If a rank fails.
    """
    if (gpus := count_gpus()) < GPUS:
        raise ResourceError(f"bench script: needs {GPUS} GPUs; there are {gpus}")
    rows = []
    on_one_host = ENGINE_LAYOUTS if LAYERS == "te" else LAYOUTS
    runnable = SHARING_LAYOUTS if HOSTS == "two" else on_one_host
    layouts = {layout.name: layout for layout in runnable}
    ways = WAYS if HOSTS == "one" else (NOTHING, OURS)
    chosen = os.environ.get("RL_SAFE_BENCH_LAYOUTS", ";".join(layouts)).split(";")
    for layout in map(layouts.__getitem__, chosen):
        found = run_layout(layout, ways, device="cuda", hidden=HIDDEN, tokens=TOKENS)
        report(f"{layout.name}, {LAYERS}: {json.dumps(found)}")
        rows += rows_of(f"{layout.name}, {LAYERS}", found)
    return rows


def run_layout(
    layout: Layout, ways: Sequence[str], *, device: str, hidden: int, tokens: int, blocks: int = BLOCKS
) -> dict[str, dict[str, float]]:
    """Runs one layout in several ways; returns the worst rank's figures by way.

    Args:
        layout: The layout.
        ways: The ways, which run one after the other, for their memory.
        device: ``cuda`` or ``cpu``.
        hidden: Hidden size of the model.
        tokens: Tokens of each sequence.
        blocks: Number of timed blocks of each of `IN_TURNS`.
    """
    with _served(layout, ways, device=device, hidden=hidden, tokens=tokens) as alone:
        found = _results_of(layout, alone, JOB_S)
    figures = {job.way: _worst(of_ranks) for job, of_ranks in zip(alone, found, strict=True)}
    if HOSTS != "one":
        return figures
    theirs, ours = run_in_turns(layout, IN_TURNS, device=device, hidden=hidden, tokens=tokens, blocks=blocks)
    figures[OURS] |= block_ratios(ours, theirs)
    return figures


def run_in_turns(
    layout: Layout,
    ways: tuple[str, str],
    *,
    device: str,
    hidden: int,
    tokens: int,
    blocks: int = BLOCKS,
    block_steps: int = BLOCK_STEPS,
) -> list[list[dict[str, Any]]]:
    """Runs two ways side by side, with their blocks of steps in turns; returns the figures of each way by rank.

    Args:
        layout: The layout.
        ways: Two of `WAYS` and `WATCHED`.
        device: ``cuda`` or ``cpu``.
        hidden: Hidden size of the model.
        tokens: Tokens of each sequence.
        blocks: Number of timed blocks of each way.
        block_steps: Number of steps of a block.
    """
    turns, address, _ = serve_store("127.0.0.1", timeout=_STORE_TIMEOUT)
    with _served(layout, ways, device=device, hidden=hidden, tokens=tokens) as jobs:
        jobs = [
            replace(job, turns_port=address.port, place=place, blocks=blocks, block_steps=block_steps)
            for place, job in enumerate(jobs)
        ]
        with ThreadPoolExecutor(len(jobs)) as pool:
            found = [*pool.map(lambda job: _results_of(layout, [job], TURNS_S)[0], jobs)]
    del turns  # the store must serve until here
    return found


def block_ratios(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns `median_with_bounds` of the blocks' ratios. A block's time is that of its slowest rank."""
    seconds = [list(map(max, *(of_rank["block_s"] for of_rank in of_ranks))) for of_ranks in (ours, theirs)]
    return median_with_bounds([a / b for a, b in zip(*seconds, strict=True)])


@contextmanager
def _served(layout: Layout, ways: Sequence[str], *, device: str, hidden: int, tokens: int) -> Iterator[list[Job]]:
    """Yields a job for each way, and serves the stores of their default groups during the body."""
    stores = [serve_store("127.0.0.1", timeout=_STORE_TIMEOUT) for _ in ways]
    yield [
        Job(
            way=way,
            sizes=dict(layout.sizes),
            features={"moe": True, "aux_loss": True, **layout.features},
            layers=LAYERS,
            fp8=layout.fp8,
            port=address.port,
            ranks=layout.ranks,
            device=device,
            hidden=hidden,
            tokens=tokens,
        )
        for way, (_, address, _) in zip(ways, stores, strict=True)
    ]


def _results_of(layout: Layout, jobs: Sequence[Job], seconds: float) -> list[list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as name:
        fields = [asdict(job) for job in jobs]
        what = f"bench script: {layout.name}"
        return run_jobs(MODULE, fields, Path(name), ranks=layout.ranks, what=what, job_s=seconds)


def median_with_bounds(values: Sequence[float]) -> dict[str, float]:
    """Returns the median of ratios and its 95 % interval, by the names of the table's figures."""
    return dict(zip(("step_ratio", "step_ratio_low", "step_ratio_high"), median_and_interval(values), strict=True))


def median_and_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median and both ends of its 95 % interval, two of the values chosen by the binomial distribution."""
    ordered, count = sorted(values), len(values)
    tail, below = 0.0, 0
    while tail + comb(count, below) / 2**count <= 0.025:
        tail += comb(count, below) / 2**count
        below += 1
    low = max(below - 1, 0)
    return median(ordered), ordered[low], ordered[-1 - low]


def _worst(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = ("growth_bytes", "warm_bytes", "late_bytes", "predicted_bytes", "warmup_s", "named_late")
    return {key: max(found[key] for found in ranks) for key in keys}


def rows_of(name: str, found: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Returns the table of one layout."""
    growth = {way: figures["growth_bytes"] / MIB for way, figures in found.items()}
    ours = found[OURS]
    rows = [
        gpu_row(f"{name}: late bytes of communicators", "MiB", ours["late_bytes"] / MIB, at_most(0)),
        gpu_row(
            f"{name}: prediction off by",
            "",
            abs(ours["predicted_bytes"] / ours["warm_bytes"] - 1) if ours["warm_bytes"] else float("nan"),
            at_most(0.15),
        ),
        gpu_row(f"{name}: collectives that the late watch names", "", ours["named_late"], at_most(0)),
        gpu_row(
            f"{name}: growth in 4 steps, against nothing",
            "MiB",
            growth[OURS],
            at_most(0.55 if HOSTS == "one" else 1),
            growth[NOTHING],
        ),
    ]
    if HOSTS != "one":
        return rows
    return [
        *rows,
        gpu_row(f"{name}: the same, against every group", "MiB", growth[OURS], at_most(0.25), growth[EVERY]),
        gpu_row(f"{name}: the same, {UNLIMITED}", "MiB", growth[UNLIMITED], at_least(0)),
        gpu_row(f"{name}: step, against nothing, median of the blocks", "", ours["step_ratio"], at_most(1.03)),
        gpu_row(f"{name}: the same, lower end of its 95 % interval", "", ours["step_ratio_low"], at_least(0)),
        gpu_row(f"{name}: the same, upper end", "", ours["step_ratio_high"], at_least(0)),
    ]
