"""Measures Transformer Engine's layers, in bf16 and in 8 bits, in the main job and in a larger model's step.

Needs a GPU and Transformer Engine. If there is one GPU, the ranks that load a checkpoint share it and count as separate
hosts. The larger model then trains on one rank.
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
    main_job,
    make_model,
    placements,
    run_ranks,
    run_recipe,
)
from benchmarks.gpus import count_gpus, gpu_row
from benchmarks.script import median_with_bounds
from benchmarks.table import Row, at_least, at_most
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import ResourceError
from rl_safe_workers.models.layer_choice import why_no_transformer_engine
from rl_safe_workers.models.seeded import PUBLISHED_LATENT_SIZES, Family, create_seeded_model

_TAKEN = ("megatron.transformer_impl=transformer_engine",)
_FP8 = (*_TAKEN, "megatron.fp8=hybrid", "rollout.max_logprob_gap=1", "trainer.total_training_steps=6")
FP8_LAYERS = {", fp8 delayed": _FP8, ", fp8 tensorwise": (*_FP8, "megatron.fp8_recipe=tensorwise")}
LAYERS = {"": _TAKEN, **FP8_LAYERS}
"""Overrides that select each kind of layers."""
FAMILIES: dict[str, tuple[Family, int, dict[str, Any]]] = {
    "qwen2": (Family.QWEN2, 0, {}),
    "qwen3_moe": (Family.QWEN3, 8, {}),
    "glm4_moe": (Family.GLM4_MOE, 8, {}),
    "deepseek_v3": (Family.DEEPSEEK_V3, 8, PUBLISHED_LATENT_SIZES),
}
"""Family, number of experts and settings of models that vLLM can serve, by ``model_type``."""
FAMILY_STEPS = 5
PARTS = os.environ.get("RL_SAFE_BENCH_PARTS", "main;fp8;families;step").split(";")
"""The parts to run."""


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs the main job with each kind of layers and each family, and steps of a model of 3 B parameters.

    Takes about fifteen minutes.

    Raises:
        ResourceError: If there is no GPU, or Transformer Engine cannot be used.
        RunError: If a part fails.
    """
    gpus = min(count_gpus(), 2)
    if not gpus:
        raise ResourceError("bench layers: needs a GPU; there is none")
    if reason := why_no_transformer_engine():
        raise ResourceError(f"bench layers: {reason}")
    colocated = next(name for name in placements(gpus) if name.endswith("colocated"))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as name:
        folder = Path(name)
        if "main" in PARTS:
            for placement in placements(gpus):
                rows += main_job(folder, placement, report, _TAKEN)
            rows += _digests("", folder / colocated, report)[0]
        if "fp8" in PARTS:
            for layers in FP8_LAYERS:
                rows += _eight_bits(layers, colocated, folder / layers.strip(", ").replace(" ", "_"), report)
        if "families" in PARTS:
            for family in FAMILIES:
                rows += _family(family, colocated, folder, report)
        if "step" in PARTS:
            rows += _steps(folder, gpus, report)
    return rows


def _family(name: str, placement: str, folder: Path, report: Callable[[str], None]) -> list[Row]:
    """Runs some steps of the main job with a model of another family, without replay of the routing."""
    family, experts, settings = FAMILIES[name]
    spec, model = SeededModelConfig(num_experts=experts), folder / "models" / name
    create_seeded_model(model, spec, family=family, dtype="bfloat16", settings=settings)
    overrides = [f"model.path={model}", "model.create=null", "rollout.enable_rollout_routing_replay=false"]
    overrides += [f"trainer.total_training_steps={FAMILY_STEPS}", f"trainer.save_freq={FAMILY_STEPS}"]
    found = run_recipe(folder / name, [*PLACEMENTS[placement], *overrides, *_TAKEN])
    report(f"{name}: {json.dumps(found)}")
    return [
        gpu_row(f"{name}: logprob gap, median of the worst step", "nat", found["median_gap"], at_most(0.005)),
        gpu_row(f"{name}: logprob gap, largest of all steps", "nat", found["largest_gap"], at_most(0.25)),
        gpu_row(f"{name}: late bytes of communicators", "B", found["late_bytes"], at_most(0)),
    ]


def _eight_bits(layers: str, placement: str, folder: Path, report: Callable[[str], None]) -> list[Row]:
    """Runs the main job in 8 bits. Compares its gap with the gap of 8 bits in forward passes of megatron-core alone."""
    found = run_recipe(folder, [*PLACEMENTS[placement], *LAYERS[layers]])
    report(f"{placement}{layers}: {json.dumps(found)}")
    digests, plain = _digests(layers, folder, report)
    gap = found["first_gap"]
    name = f"{placement.replace('_', ' ')}{layers}"
    return [
        gpu_row(f"{name}: late bytes of communicators", "B", found["late_bytes"], at_most(0)),
        gpu_row(f"{name}: processes left", "", found["processes"], at_most(0)),
        gpu_row(f"{name}: GPU memory left", "MiB", found["gpu_mib"], at_most(0)),
        gpu_row(f"logprob gap of the first step{layers}, against megatron-core's", "nat", gap, at_most(1.25), plain),
        *digests,
    ]


def _digests(layers: str, run: Path, report: Callable[[str], None]) -> tuple[list[Row], float]:
    """Loads the last checkpoint at EP2 and at TP2 EP2, with our loader and with megatron-core's own reader.

    Returns:
        The rows, and the gap of 8-bit layers in forward passes of megatron-core alone; 0 without such layers.
    """
    checkpoint = max(run.rglob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    found: list[dict[str, Any]] = []
    for tensor in (1, 2):
        overrides = [f"model.path={_model(run)}", *_ranks(2, tensor=tensor), *LAYERS[layers]]
        found.append(run_ranks("layers", overrides, variables={CHECKPOINT: str(checkpoint)}))
        report(f"loaded at TP{tensor} EP2{layers}: {json.dumps(found[-1])}")
    loads = [each[way] for each in found for way in ("ours", "stock")]
    name = f"saved{layers}; loaded at EP2 and TP2 EP2, also by megatron-core"
    rows = [
        gpu_row(f"{name}: digests of all parameters", "", len({load["weights"] for load in loads}), at_most(1)),
        gpu_row(f"{name}: digests of all extra states", "", len({load["extra_states"] for load in loads}), at_most(1)),
        gpu_row(f"extra states with scales{layers}", "", loads[0]["count"], at_least(1 if layers else 0)),
    ]
    return rows, found[0].get("plain_gap", 0.0)


def _model(run: Path) -> Path:
    return next(run.glob("models/*"))


def _ranks(ranks: int, *, tensor: int = 1) -> Sequence[str]:
    return (
        f"cluster.num_trainers={ranks}",
        f"megatron.expert_model_parallel_size={ranks}",
        f"megatron.tensor_model_parallel_size={tensor}",
    )


def _steps(folder: Path, ranks: int, report: Callable[[str], None]) -> list[Row]:
    """Times steps of a 3 B model, against a loop over Megatron alone with the same layers."""
    model = folder / "large"
    make_model(model, LARGE)
    batch = ("actor.ppo_micro_batch_size_per_gpu=2", "data.max_response_length=448")
    found = run_ranks("blocks", [f"model.path={model}", *_ranks(ranks), *batch, *_TAKEN])
    report(f"large model: {json.dumps(found)}")
    ratio = median_with_bounds(found["ratios"])
    name = "3 B: training step against the bare loop's"
    return [
        gpu_row(f"{name}, median of the blocks", "", ratio["step_ratio"], at_most(1.03)),
        gpu_row(f"{name}, lower end of its 95 % interval", "", ratio["step_ratio_low"], at_most(1.03)),
        gpu_row(f"{name}, upper end of its 95 % interval", "", ratio["step_ratio_high"], at_most(1.03)),
    ]
