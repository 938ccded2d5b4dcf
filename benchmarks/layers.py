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

from benchmarks.gpu import CHECKPOINT, LARGE, count_gpus, gpu_row, main_job, make_model, placements, run_ranks
from benchmarks.script import median_with_bounds
from benchmarks.table import Row, at_least, at_most
from rl_safe_workers.driver.outputs.metrics import LOGPROB_GAP_MEDIAN
from rl_safe_workers.errors import ResourceError
from rl_safe_workers.models.layer_choice import why_no_transformer_engine

GPUS = 2
_TAKEN = ("megatron.transformer_impl=transformer_engine",)
LAYERS = {
    "": _TAKEN,
    ", fp8 delayed": (*_TAKEN, "megatron.fp8=hybrid", "rollout.max_logprob_gap=1"),
    ", fp8 tensorwise": (*_TAKEN, "megatron.fp8=hybrid", "megatron.fp8_recipe=tensorwise", "rollout.max_logprob_gap=1"),
}
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
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as folder:
        if "main" in PARTS:
            for placement in placements(GPUS):
                rows += main_job(_folder(folder, placement), placement, report, overrides=_TAKEN)
            rows += _digests("", Path(folder) / COLOCATED / COLOCATED, report)
        for layers in [name for name in LAYERS if name and "fp8" in PARTS]:
            of_layers = _folder(folder, layers.strip(", ").replace(" ", "_"))
            rows += _eight_bits(layers, of_layers, report)
        if "step" in PARTS:
            rows += _steps(Path(folder), report)
    return rows


def _folder(parent: str, name: str) -> Path:
    folder = Path(parent) / name
    folder.mkdir()
    return folder


def _eight_bits(layers: str, folder: Path, report: Callable[[str], None]) -> list[Row]:
    """The main job in 8 bits. Its gap is compared with the one that 8 bits cost in forwards of megatron-core alone."""
    run = folder / COLOCATED
    rows = main_job(folder, COLOCATED, report, layers=layers, overrides=LAYERS[layers])
    overrides = [f"model.path={_model(run)}", *_ranks(tensor=1), *LAYERS[layers]]
    plain = run_ranks("precision", overrides)["plain_gap"]
    first = json.loads(next(run.glob("outputs/*/metrics.jsonl")).read_text(encoding="utf-8").splitlines()[0])
    gap = first[LOGPROB_GAP_MEDIAN]
    # Of the main job's rows these say something else in 8 bits.
    kept = [row for row in rows if "logprob gap" not in row.name]
    return [
        *kept,
        gpu_row(f"logprob gap of the first step{layers}, against megatron-core's", "nat", gap, at_most(1.25), plain),
        *_digests(layers, run, report),
    ]


def _digests(layers: str, run: Path, report: Callable[[str], None]) -> list[Row]:
    """Loads the last checkpoint at EP2, at TP2 EP2, and with megatron-core's own reader."""
    (checkpoint,) = run.rglob("global_step_20")
    variables = {CHECKPOINT: str(checkpoint)}
    ways = (("digest", 1), ("digest", 2), ("stock_digest", 1), ("stock_digest", 2))
    found: list[dict[str, Any]] = []
    for job, tensor in ways:
        overrides = [f"model.path={_model(run)}", *_ranks(tensor=tensor), *LAYERS[layers]]
        found.append(run_ranks(job, overrides, variables=variables))
        report(f"{job}, TP{tensor} EP2{layers}: {json.dumps(found[-1])}")
    return [
        gpu_row(f"saved at EP2{layers}; loaded so, at TP2 EP2, by megatron-core: {name}", "", len(values), at_most(1))
        for name, values in (
            ("digests of all parameters", {each["digest"] for each in found}),
            ("digests of all extra states", {each["extra_digest"] for each in found}),
        )
    ] + [gpu_row(f"extra states with scales{layers}", "", found[0]["extra_states"], at_least(1 if layers else 0))]


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
