"""Runs the main job with every layout of trainers and vLLM engines. Checks that they agree, and that syncs are proved.

It runs on CPU, or on GPUs if there are two. Trainers and engines then share two GPUs. With four GPUs, it also runs
trainers and engines on GPUs of their own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import RECIPE as GPU_RECIPE
from benchmarks.gpus import count_gpus, machine
from benchmarks.quickstart import GAP, RECIPE, require_recipe, run_recipe
from benchmarks.table import Goal, Row, at_most
from rl_safe_workers.driver.outputs import metrics as names
from rl_safe_workers.versions import installed_versions

STEPS = 3
TRAINERS: Mapping[str, tuple[str, ...]] = {
    "TP1 EP2": ("cluster.num_trainers=2", "megatron.expert_model_parallel_size=2"),
    "TP2 EP2": (
        "cluster.num_trainers=2",
        "megatron.tensor_model_parallel_size=2",
        "megatron.expert_model_parallel_size=2",
    ),
    "PP2": (
        "cluster.num_trainers=2",
        "megatron.pipeline_model_parallel_size=2",
        "megatron.expert_model_parallel_size=1",
    ),
}
ENGINES: Mapping[str, tuple[str, ...]] = {
    "TP1": ("cluster.num_rollouts=1",),
    "TP2": ("cluster.num_rollouts=2", "rollout.tensor_model_parallel_size=2"),
    "2 x TP1": ("cluster.num_rollouts=2",),
}
RANKS_ON_GPUS = 2
"""Number of trainers on GPUs, and of the rollout ranks that share these."""
COLOCATED = "cluster.colocated=true"
GAP_ON_GPUS = at_most(0.03)
"""Largest gap of log-probabilities on GPUs, in bf16."""


class Placement(NamedTuple):
    """Where trainers and engines run."""

    recipe: Path
    gap: Goal
    overrides: tuple[str, ...] = ()
    suffix: str = ""

    @property
    def is_colocated(self) -> bool:
        """True if each engine rank shares its GPU with a trainer."""
        return COLOCATED in self.overrides


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs three steps with each pair of layouts, and proves each sync.

    Args:
        report: Takes a line of progress after each run.

    Raises:
        ConfigError: If this is no checkout with recipes.
        RunError: If a run fails, e.g. because a sync puts wrong weights into an engine twice.
    """
    require_recipe("engine_layouts")
    facts: dict[str, Any] = {"machine": machine(), "versions": installed_versions(), "runs": 1}
    rows: list[Row] = []
    layouts = product(_placements(count_gpus()), TRAINERS.items(), ENGINES.items())
    for placement, (trainers, of_trainers), (engines, of_engines) in layouts:
        if placement.is_colocated and f"cluster.num_rollouts={RANKS_ON_GPUS}" not in of_engines:
            continue
        pair = f"trainers {trainers}, engines {engines}{placement.suffix}"
        with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as folder:
            overrides = (*of_trainers, *of_engines, *placement.overrides)
            records = _run(pair, Path(folder), placement.recipe, overrides)
        gap = max(record[names.LOGPROB_GAP_MAX] for record in records)
        redone, unread = (sum(record[name] for record in records) for name in (names.REDONE, names.NOT_PROVED))
        proved = sum(record[names.PROVED] for record in records)
        report(f"{pair}: gap {gap:.2e} nat, {proved:.0f} digests equal, {redone:.0f} syncs redone")
        rows += [
            Row(name=f"{pair}: logprob gap", unit="nat", ours=gap, goal=placement.gap, **facts),
            Row(name=f"{pair}: weights not proved, syncs redone", unit="", ours=unread + redone, goal=at_most(0),
                **facts),
        ]  # fmt: skip
    return rows


def _placements(gpus: int) -> list[Placement]:
    if gpus < RANKS_ON_GPUS:
        return [Placement(RECIPE, GAP)]
    colocated = Placement(GPU_RECIPE, GAP_ON_GPUS, (COLOCATED,), ", colocated")
    return [colocated, *([] if gpus < 2 * RANKS_ON_GPUS else [Placement(GPU_RECIPE, GAP_ON_GPUS)])]


def _run(pair: str, folder: Path, recipe: Path, overrides: tuple[str, ...]) -> list[dict[str, Any]]:
    return run_recipe(
        f"bench engine_layouts: {pair}",
        folder,
        *overrides,
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=-1",
        "rollout.prove_sync_freq=1",
        recipe=recipe,
    )
