"""A plain Megatron script: memory and steps with `bootstrap` and `channel_limits`, against the script left to itself.

Needs two GPUs. Every figure is of the rank that takes most, in one run of the command. ``RL_SAFE_BENCH_LAYERS=te``
takes Transformer Engine's layers, and adds context parallelism and fp8.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from benchmarks.comms import EVERY, MIB, NOTHING, OURS, run_jobs
from benchmarks.gpu import count_gpus, gpu_row
from benchmarks.table import Row, at_least, at_most
from rl_safe_workers.errors import ResourceError
from rl_safe_workers.worlds.store import serve_store

RANKS = 2
MODULE = "benchmarks.script_ranks"
UNLIMITED = "ours, without channel_limits"
WAYS = (NOTHING, EVERY, UNLIMITED, OURS)
LAYERS = os.environ.get("RL_SAFE_BENCH_LAYERS", "local")
HIDDEN, TOKENS = 1024, 1024
JOB_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout of two ranks.

    Example: ``Layout(name="EP2", sizes={"expert_model_parallel_size": 2})``
    """

    name: str
    sizes: Mapping[str, int]
    fp8: bool = False


_EP2 = {"expert_model_parallel_size": 2}
LAYOUTS = (
    Layout(name="EP2", sizes=_EP2),
    Layout(name="TP2 EP2", sizes={"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, **_EP2}),
    Layout(name="PP2", sizes={"pipeline_model_parallel_size": 2}),
)
ENGINE_LAYOUTS = (
    *LAYOUTS,
    Layout(name="CP2", sizes={"context_parallel_size": 2}),
    Layout(name="EP2, fp8", sizes=_EP2, fp8=True),
)


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs every layout in every way; takes some five minutes.

    Raises:
        ResourceError: If there are fewer than two GPUs.
        RunError: If a rank fails.
    """
    if (gpus := count_gpus()) < RANKS:
        raise ResourceError(f"bench script: needs {RANKS} GPUs; there are {gpus}")
    rows = []
    for layout in ENGINE_LAYOUTS if LAYERS == "te" else LAYOUTS:
        found = run_layout(layout, WAYS, device="cuda", hidden=HIDDEN, tokens=TOKENS)
        report(f"{layout.name}, {LAYERS}: {json.dumps(found)}")
        rows += rows_of(f"{layout.name}, {LAYERS}", found)
    return rows


def run_layout(
    layout: Layout, ways: Sequence[str], *, device: str, hidden: int, tokens: int
) -> dict[str, dict[str, float]]:
    """Runs one layout in several ways, one after the other; returns the worst rank's figures by way."""
    stores = [serve_store("127.0.0.1", timeout=timedelta(minutes=5)) for _ in ways]
    jobs = [
        {
            "way": way,
            "sizes": dict(layout.sizes),
            "layers": LAYERS,
            "fp8": layout.fp8,
            "port": address.port,
            "ranks": RANKS,
            "device": device,
            "hidden": hidden,
            "tokens": tokens,
        }
        for way, (_, address, _) in zip(ways, stores, strict=True)
    ]
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as name:
        what = f"bench script: {layout.name}"
        results = run_jobs(MODULE, jobs, Path(name), ranks=RANKS, what=what, job_s=JOB_S)
    return {way: _worst(of_ranks) for way, of_ranks in zip(ways, results, strict=True)}


def _worst(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    keys = ("growth_bytes", "warm_bytes", "late_bytes", "predicted_bytes", "step_s", "warmup_s")
    return {key: max(found[key] for found in ranks) for key in keys}


def rows_of(name: str, found: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """The table of one layout."""
    growth = {way: figures["growth_bytes"] / MIB for way, figures in found.items()}
    ours = found[OURS]
    return [
        gpu_row(f"{name}: growth in 4 steps, against nothing", "MiB", growth[OURS], at_most(0.55), growth[NOTHING]),
        gpu_row(f"{name}: the same, against every group", "MiB", growth[OURS], at_most(0.25), growth[EVERY]),
        gpu_row(f"{name}: the same, {UNLIMITED}", "MiB", growth[UNLIMITED], at_least(0)),
        gpu_row(f"{name}: late bytes of communicators", "MiB", ours["late_bytes"] / MIB, at_most(0)),
        gpu_row(f"{name}: step, against nothing", "s", ours["step_s"], at_most(1.03), found[NOTHING]["step_s"]),
        gpu_row(
            f"{name}: prediction off by",
            "",
            abs(ours["predicted_bytes"] / ours["warm_bytes"] - 1) if ours["warm_bytes"] else float("nan"),
            at_most(0.15),
        ),
    ]
