"""Runs the main job with every layout of trainers and vLLM engines. Checks that they agree, and that syncs are proved.

It runs on CPU, or on two GPUs if there are two. Trainers and engines then share the GPUs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import RECIPE as GPU_RECIPE
from benchmarks.gpus import count_gpus, machine
from benchmarks.quickstart import GAP, RECIPE, require_recipe, run_recipe
from benchmarks.table import Row, at_most
from rl_safe_workers.driver.outputs import metrics as names
from rl_safe_workers.versions import installed_versions

STEPS = 3
TRAINERS: Mapping[str, tuple[str, ...]] = {
    "TP1 EP2": ("cluster.num_trainers=2",),
    "TP2 EP2": ("cluster.num_trainers=2", "megatron.tensor_model_parallel_size=2"),
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
ON_GPUS = ("cluster.colocated=true",)
ROLLOUTS_ON_GPUS = 2
"""Number of rollout ranks on GPUs. Each shares its GPU with a trainer."""
GAP_ON_GPUS = at_most(0.03)
"""Largest gap of log-probabilities on GPUs, in bf16."""


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs three steps with each pair of layouts, and proves each sync.

    Args:
        report: Takes a line of progress after each run.

    Raises:
        ConfigError: If this is no checkout with recipes.
        RunError: If a run fails, e.g. because a sync puts wrong weights into an engine twice.
    """
    require_recipe("engine_layouts")
    on_gpus = count_gpus() >= ROLLOUTS_ON_GPUS
    recipe, more = (GPU_RECIPE, ON_GPUS) if on_gpus else (RECIPE, ())
    facts: dict[str, Any] = {"machine": machine(), "versions": installed_versions(), "runs": 1}
    rows: list[Row] = []
    for trainers, of_trainers in TRAINERS.items():
        for engines, of_engines in ENGINES.items():
            if on_gpus and f"cluster.num_rollouts={ROLLOUTS_ON_GPUS}" not in of_engines:
                continue
            pair = f"trainers {trainers}, engines {engines}"
            with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as folder:
                records = _run(pair, Path(folder), recipe, (*of_trainers, *of_engines, *more))
            gap = max(record[names.LOGPROB_GAP_MAX] for record in records)
            redone, unread = (sum(record[name] for record in records) for name in (names.REDONE, names.NOT_PROVED))
            proved = sum(record[names.PROVED] for record in records)
            report(f"{pair}: gap {gap:.2e} nat, {proved:.0f} digests equal, {redone:.0f} syncs redone")
            rows += [
                Row(name=f"{pair}: logprob gap", unit="nat", ours=gap, goal=GAP_ON_GPUS if on_gpus else GAP,
                    **facts),
                Row(name=f"{pair}: weights not proved, syncs redone", unit="", ours=unread + redone, goal=at_most(0),
                    **facts),
            ]  # fmt: skip
    return rows


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
