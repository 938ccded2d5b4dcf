"""Measures how long ranks with live communicators take to end, against torch's own way of ending.

Needs two or four GPUs. The time runs from the moment when the ranks begin to end until the last process is gone. It
includes the shutdown of CUDA and Python.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from statistics import median

from benchmarks.comms import RECIPE, Layout, layouts_for, run_jobs
from benchmarks.exits_ranks import EVERY, EVERY_TORCH, OURS, Job
from benchmarks.gpu import make_model
from benchmarks.gpus import count_gpus, gpu_row
from benchmarks.table import Row, at_least, at_most
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.worlds.store import serve_store

TIMES: Mapping[str, int] = {EVERY: 20, OURS: 3, EVERY_TORCH: 3}
"""Number of runs of each way."""
LONGEST_S = 8.0
JOB_S = 60.0
MODULE = "benchmarks.exits_ranks"


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs the first layout that fits. Takes about five minutes.

    Args:
        report: Takes a line of progress at the end.

    Raises:
        ResourceError: If there are fewer than two GPUs.
        RunError: If a rank fails.
    """
    layout = layouts_for(count_gpus())[0]
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as folder:
        model = Path(folder) / "model"
        make_model(model, SeededModelConfig())
        found = run_ways(Path(folder), layout, [f"model.path={model}"], TIMES, recipe=RECIPE)
    report(json.dumps(found))
    return rows(layout.name, found)


def run_ways(
    folder: Path, layout: Layout, overrides: Sequence[str], times: Mapping[str, int], *, recipe: Path
) -> dict[str, list[float]]:
    """Runs each way the given number of times; returns the seconds of each end by way.

    Args:
        folder: Folder for the jobs and their results.
        layout: Layout of the ranks.
        overrides: Overrides of the recipe.
        times: Number of runs, by way.
        recipe: The recipe, for the device and all other settings.
    """
    ways = [way for way, count in times.items() for _ in range(count)]
    stores = [serve_store("127.0.0.1", timeout=timedelta(minutes=5)) for _ in ways]
    settings = [f"cluster.num_trainers={layout.ranks}", *overrides, *layout.overrides]
    jobs = [
        Job(way=way, recipe=str(recipe), overrides=settings, port=address.port, secret=address.secret.hex())
        for way, (_, address, _) in zip(ways, stores, strict=True)
    ]
    results = run_jobs(
        MODULE,
        [asdict(job) for job in jobs],
        folder,
        ranks=layout.ranks,
        what=f"bench exits: {layout.name}",
        job_s=JOB_S,
    )
    found: dict[str, list[float]] = {way: [] for way in times}
    for way, ranks in zip(ways, results, strict=True):
        found[way].append(max(rank["ended_at"] for rank in ranks) - max(rank["began_at"] for rank in ranks))
    return found


def rows(layout: str, found: Mapping[str, Sequence[float]]) -> list[Row]:
    """Returns the table."""
    every = found[EVERY]
    soon = sum(seconds <= LONGEST_S for seconds in every)
    return [
        gpu_row(f"{layout}: every group alive, slowest end", "s", max(every), at_most(LONGEST_S)),
        gpu_row(f"{layout}: ends within {LONGEST_S:g} s, of {len(every)}", "", soon, at_least(len(every))),
        gpu_row(
            f"{layout}: median end, against destroy_process_group",
            "s",
            median(every),
            at_most(1),
            median(found[EVERY_TORCH]),
        ),
        gpu_row(f"{layout}: after our bootstrap, slowest end", "s", max(found[OURS]), at_most(LONGEST_S)),
    ]
