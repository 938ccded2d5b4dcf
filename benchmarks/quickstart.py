"""Runs the main job for three arbitrary seeds. Measures learning, the gap between rollout and trainer, and the cost.

Each seed runs in its own empty folder, so its seconds include making the model.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import rl_safe_workers
from benchmarks.table import Goal, Relation, Row, machine_in_words
from rl_safe_workers.driver.outputs import metrics as names
from rl_safe_workers.driver.outputs.console import GIB
from rl_safe_workers.driver.outputs.process_memory import MemorySampler
from rl_safe_workers.errors import ConfigError, RunError
from rl_safe_workers.own_process import module_command
from rl_safe_workers.versions import installed_versions

SEEDS = (0, 1, 2)
STEPS = 20
LAST_STEPS = 5
"""Number of last steps. Their mean reward is compared with the mean reward of the first step."""
INTERRUPTED_S = 60.0
"""Seconds that a run may take to end after Ctrl-C."""
RECIPE = Path(rl_safe_workers.__file__).parents[1] / "recipes" / "quickstart.yaml"

LEARNING = Goal(relation=Relation.AT_LEAST, bound=2)
GAP = Goal(relation=Relation.AT_MOST, bound=1e-5)
WALL = Goal(relation=Relation.AT_MOST, bound=75)
MEMORY = Goal(relation=Relation.AT_MOST, bound=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one run."""

    seed: int
    learning: float
    """Mean reward of the last steps, divided by the mean reward of the first."""
    gap: float
    """Largest difference between rollout and trainer in the log-probability of a sampled token, in nats."""
    wall_s: float
    """Seconds from the start of the process to its exit."""
    peak_gib: float
    """Largest memory of all processes together at one time, in GiB."""


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs the recipe once for each seed.

    Args:
        report: Takes a line of progress after each run.

    Raises:
        ConfigError: If this is no checkout with recipes.
        RunError: If a run fails.
    """
    require_recipe("quickstart")
    results = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as folder:
            figures = run_seed(seed, Path(folder))
        report(
            f"seed {seed}: reward gain {figures.learning:.2f}, gap {figures.gap:.2e} nat, "
            f"{figures.wall_s:.1f} s, {figures.peak_gib:.2f} GiB"
        )
        results.append(figures)
    return to_rows(results, machine=machine_in_words(), versions=installed_versions())


def require_recipe(name: str) -> None:
    """Refuses to run benchmark ``name`` without the recipe.

    Raises:
        ConfigError: If this is no checkout with recipes.
    """
    if not RECIPE.is_file():
        raise ConfigError(f"bench {name}: {RECIPE} does not exist; run it from a checkout, installed in place")


def run_seed(seed: int, folder: Path) -> Figures:
    """Runs the recipe in an empty folder and measures it from outside."""
    overrides = [f"trainer.seed={seed}", f"trainer.total_training_steps={STEPS}"]
    started_s = time.monotonic()
    with MemorySampler() as memory:
        records = run_recipe(f"bench quickstart: the run for seed {seed}", folder, *overrides)
    wall_s = time.monotonic() - started_s
    return to_figures(seed, records, wall_s=wall_s, peak_bytes=memory.peak_bytes)


def run_recipe(what: str, folder: Path, *overrides: str, recipe: Path = RECIPE) -> list[dict[str, Any]]:
    """Runs a recipe in a folder, as run ``bench``. Returns the metrics of each step.

    Raises:
        RunError: If the run fails. The error begins with ``what``.
    """
    command = module_command("rl_safe_workers", "run", str(recipe), "trainer.run_name=bench", *overrides)
    code, complaint = _run(command, folder)
    if code != 0:
        reason = (complaint.strip().splitlines() or ["it says nothing"])[-1]
        raise RunError(f"{what} ended with exit code {code}: {reason}")
    lines = (folder / "outputs" / "bench" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Runs a command in a folder; returns its exit code and what it wrote to stderr."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, complaint = process.communicate()
    except BaseException:
        # subprocess.run would kill it, and then it could not end its own processes.
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=INTERRUPTED_S)
        raise
    return process.returncode, complaint


def to_figures(seed: int, records: Sequence[Mapping[str, Any]], *, wall_s: float, peak_bytes: int) -> Figures:
    """Returns the figures of one run, from its metrics."""
    rewards = [record[names.REWARD_MEAN] for record in records]
    return Figures(
        seed=seed,
        learning=mean(rewards[-LAST_STEPS:]) / rewards[0],
        gap=max(record[names.LOGPROB_GAP_MAX] for record in records),
        wall_s=wall_s,
        peak_gib=peak_bytes / GIB,
    )


def to_rows(results: Sequence[Figures], *, machine: str, versions: Mapping[str, str]) -> list[Row]:
    """Returns a row for each seed's learning; for the other figures, a row for the worst run."""
    per_seed = [(f"reward gain, seed {r.seed}", "", r.learning, LEARNING, 1) for r in results]
    worst = [
        ("logprob gap, worst", "nat", max(r.gap for r in results), GAP, len(results)),
        ("wall time, worst", "s", max(r.wall_s for r in results), WALL, len(results)),
        ("peak memory, worst", "GiB", max(r.peak_gib for r in results), MEMORY, len(results)),
    ]
    return [
        Row(name=name, unit=unit, ours=ours, goal=goal, runs=runs, machine=machine, versions=versions)
        for name, unit, ours, goal, runs in [*per_seed, *worst]
    ]
