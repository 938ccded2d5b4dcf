"""Transformer Engine's layers in the main job, in bf16 and in 8 bits, and a larger model's step with them.

Needs two GPUs and Transformer Engine.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import (
    CHECKPOINT,
    LARGE,
    PLACEMENTS,
    count_gpus,
    gpu_row,
    main_job,
    make_model,
    placements,
    run_ranks,
    run_recipe,
)
from benchmarks.script import median_with_bounds
from benchmarks.table import Row, at_least, at_most
from rl_safe_workers.errors import ResourceError
from rl_safe_workers.models.layer_choice import why_no_transformer_engine

GPUS = 2
_TAKEN = ("megatron.transformer_impl=transformer_engine",)
_FP8 = (*_TAKEN, "megatron.fp8=hybrid", "rollout.max_logprob_gap=1", "trainer.total_training_steps=6")
FP8_LAYERS = {", fp8 delayed": _FP8, ", fp8 tensorwise": (*_FP8, "megatron.fp8_recipe=tensorwise")}
LAYERS = {"": _TAKEN, **FP8_LAYERS}
"""Overrides that ask for each kind of layers."""
COLOCATED = "2_GPUs_colocated"
PARTS = os.environ.get("RL_SAFE_BENCH_PARTS", "main;fp8;step").split(";")
"""The parts to run."""


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs the main job with each kind of layers, and steps of a model of 3 B parameters; takes some twelve minutes.

    Raises:
        ResourceError: If there are fewer than two GPUs, or Transformer Engine cannot be used.
        RunError: If a part fails.
    """
    if (gpus := count_gpus()) < GPUS:
        raise ResourceError(f"bench layers: needs {GPUS} GPUs; there are {gpus}")
    if reason := why_no_transformer_engine():
        raise ResourceError(f"bench layers: {reason}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as name:
        folder = Path(name)
        if "main" in PARTS:
            for placement in placements(GPUS):
                rows += main_job(folder, placement, report, _TAKEN)
            rows += _digests("", folder / COLOCATED, report)[0]
        if "fp8" in PARTS:
            for layers in FP8_LAYERS:
                rows += _eight_bits(layers, folder / layers.strip(", ").replace(" ", "_"), report)
        if "step" in PARTS:
            rows += _steps(folder, report)
    return rows


def _eight_bits(layers: str, folder: Path, report: Callable[[str], None]) -> list[Row]:
    """The main job in 8 bits. Its gap is compared with the one that 8 bits cost in forwards of megatron-core alone."""
    found = run_recipe(folder, [*PLACEMENTS[COLOCATED], *LAYERS[layers]])
    report(f"{COLOCATED}{layers}: {json.dumps(found)}")
    digests, plain = _digests(layers, folder, report)
    gap = found["first_gap"]
    return [
        gpu_row(f"2 GPUs colocated{layers}: late bytes of communicators", "B", found["late_bytes"], at_most(0)),
        gpu_row(f"2 GPUs colocated{layers}: processes left", "", found["processes"], at_most(0)),
        gpu_row(f"2 GPUs colocated{layers}: GPU memory left", "MiB", found["gpu_mib"], at_most(0)),
        gpu_row(f"logprob gap of the first step{layers}, against megatron-core's", "nat", gap, at_most(1.25), plain),
        *digests,
    ]


def _digests(layers: str, run: Path, report: Callable[[str], None]) -> tuple[list[Row], float]:
    """Loads the last checkpoint at EP2 and at TP2 EP2, with our loader and with megatron-core's own reader.

    Returns:
        The rows, and the gap of 8-bit layers in forwards of megatron-core alone; 0 without such layers.
    """
    checkpoint = max(run.rglob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    found: list[dict[str, Any]] = []
    for tensor in (1, 2):
        overrides = [f"model.path={_model(run)}", *_ranks(tensor=tensor), *LAYERS[layers]]
        found.append(run_ranks("layers", overrides, variables={CHECKPOINT: str(checkpoint)}))
        report(f"loaded at TP{tensor} EP2{layers}: {json.dumps(found[-1])}")
    loads = [each[way] for each in found for way in ("ours", "stock")]
    name = f"saved at EP2{layers}; loaded so, at TP2 EP2, by megatron-core"
    rows = [
        gpu_row(f"{name}: digests of all parameters", "", len({load["weights"] for load in loads}), at_most(1)),
        gpu_row(f"{name}: digests of all extra states", "", len({load["extra_states"] for load in loads}), at_most(1)),
        gpu_row(f"extra states with scales{layers}", "", loads[0]["count"], at_least(1 if layers else 0)),
    ]
    return rows, found[0].get("plain_gap", 0.0)


def _model(run: Path) -> Path:
    return next(run.glob("models/*"))


def _ranks(*, tensor: int) -> Sequence[str]:
    return (
        "cluster.num_trainers=2",
        "megatron.expert_model_parallel_size=2",
        f"megatron.tensor_model_parallel_size={tensor}",
    )


def _steps(folder: Path, report: Callable[[str], None]) -> list[Row]:
    """Steps of a model of 3 B parameters, against a loop over Megatron alone with the same layers."""
    model = folder / "large"
    make_model(model, LARGE)
    batch = ("actor.ppo_micro_batch_size_per_gpu=2", "data.max_response_length=448")
    found = run_ranks("blocks", [f"model.path={model}", *_ranks(tensor=1), *batch, *_TAKEN])
    report(f"large model: {json.dumps(found)}")
    ratio = median_with_bounds(found["ratios"])
    name = "3 B: training step against the bare loop's"
    return [
        gpu_row(f"{name}, median of the blocks", "", ratio["step_ratio"], at_most(1.03)),
        gpu_row(f"{name}, lower end of its 95 % interval", "", ratio["step_ratio_low"], at_most(1.03)),
        gpu_row(f"{name}, upper end of its 95 % interval", "", ratio["step_ratio_high"], at_most(1.03)),
    ]
