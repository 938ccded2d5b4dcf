"""Compares the memory that our bootstrap takes early and leaves for later with other warm-ups and with none.

Needs four GPUs, or two for smaller layouts. Every figure is from the rank that takes most, in one run of the command.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import rl_safe_workers
from benchmarks.gpu import gpu_variables, make_model
from benchmarks.gpus import count_gpus, gpu_row
from benchmarks.table import Row, at_least, at_most
from rl_safe_workers import env
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import ResourceError, RunError
from rl_safe_workers.own_process import module_command
from rl_safe_workers.worlds.store import serve_store

RECIPE = Path(rl_safe_workers.__file__).parents[1] / "recipes" / "quickstart_gpu.yaml"
LARGE = SeededModelConfig(
    num_hidden_layers=4,
    hidden_size=4096,
    intermediate_size=4096,
    moe_intermediate_size=2048,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    num_experts=8,
    num_experts_per_tok=2,
)
"""A model so large that matrix products dominate a step."""
LARGE_BATCH = ("actor.ppo_micro_batch_size_per_gpu=8",)
ROWS, TOKENS = 32, 1024
WARMUPS = ("ours", "nothing", "eight groups", "a barrier", "every group", "ours, releasing")
OURS, NOTHING, EVERY, RELEASES = "ours", "nothing", "every group", "ours, releasing"
DROPS = "ours, releasing without suspend"
"""Our way, but communicators are always dropped and made again, even if NCCL can suspend them."""
MIB = 2**20
JOB_S = 120.0
_FORKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Megatron checks for CUDA on import. If it does that without NVML, CUDA fails in every fork of that process."""
MODULE = "benchmarks.comms_ranks"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout.

    Example: ``Layout(name="TP1 EP2", ranks=4, overrides=("megatron.expert_model_parallel_size=2",))``
    """

    name: str
    ranks: int = 4
    overrides: Sequence[str]


_EP1 = "megatron.expert_model_parallel_size=1"
_EP2 = "megatron.expert_model_parallel_size=2"
_PP2 = "megatron.pipeline_model_parallel_size=2"
_TP2 = "megatron.tensor_model_parallel_size=2"
_INTERLEAVED = "megatron.virtual_pipeline_model_parallel_size=2"
LAYOUTS = (
    Layout(name="TP2 EP2", overrides=(_EP2, _TP2)),
    Layout(name="TP1 EP2, 2 instances", overrides=(_EP2, "megatron.num_distributed_optimizer_instances=2")),
    Layout(name="PP2 EP2", overrides=(_EP2, _PP2)),
    Layout(name="PP2 EP2, interleaved", overrides=(_EP2, _PP2, _INTERLEAVED)),
)
SMALL_LAYOUTS = (
    Layout(name="2 ranks, EP2", ranks=2, overrides=(_EP2,)),
    Layout(name="2 ranks, TP2 EP2", ranks=2, overrides=(_EP2, _TP2)),
    Layout(name="2 ranks, PP2", ranks=2, overrides=(_EP1, _PP2)),
    Layout(name="2 ranks, PP2, interleaved", ranks=2, overrides=(_EP1, _PP2, _INTERLEAVED)),
)


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs all layouts of four ranks, else of two, with each way of warming up. Takes about twelve minutes.

    Raises:
        ResourceError: If there are fewer than two GPUs.
        RunError: If a rank fails.
    """
    layouts = layouts_for(count_gpus())
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as folder:
        model = Path(folder) / "model"
        make_model(model, LARGE)
        found = run_layouts(
            Path(folder), layouts, [f"model.path={model}", *LARGE_BATCH], rows=ROWS, tokens=TOKENS, report=report
        )
    return [row for layout in layouts for row in rows(layout.name, found[layout.name])]


def layouts_for(gpus: int) -> Sequence[Layout]:
    """Returns the layouts of four ranks, or of two if there are fewer than four GPUs.

    Raises:
        ResourceError: If there are fewer than two GPUs.
    """
    if gpus < SMALL_LAYOUTS[0].ranks:
        raise ResourceError(f"bench comms: needs 4 GPUs, or 2 for smaller layouts; there are {gpus}")
    return LAYOUTS if gpus >= LAYOUTS[0].ranks else SMALL_LAYOUTS


def run_layouts(
    folder: Path,
    layouts: Sequence[Layout],
    overrides: Sequence[str],
    *,
    rows: int,
    tokens: int,
    report: Callable[[str], None],
    warmups: Sequence[str] = WARMUPS,
    recipe: Path = RECIPE,
) -> dict[str, dict[str, dict[str, float]]]:
    """Runs layouts one after the other; returns the worst rank's figures by layout and way.

    Args:
        folder: Folder for the jobs and their results.
        layouts: The layouts to run.
        overrides: Overrides of the recipe, for all layouts.
        rows: Sequences of a step on each data-parallel rank.
        tokens: Tokens of each sequence.
        report: Takes a line of progress after each layout.
        warmups: The ways to compare.
        recipe: The recipe, for the device and all other settings.
    """
    found = {}
    for number, layout in enumerate(layouts):
        out = folder / f"jobs_{number}"
        out.mkdir()
        found[layout.name] = _run_layout(out, layout, overrides, rows, tokens, warmups, recipe)
        report(f"{layout.name}: {json.dumps(found[layout.name])}")
    return found


def _run_layout(
    out: Path, layout: Layout, overrides: Sequence[str], rows: int, tokens: int, warmups: Sequence[str], recipe: Path
) -> dict[str, dict[str, float]]:
    stores = [serve_store("127.0.0.1", timeout=timedelta(minutes=5)) for _ in warmups]
    settings = [f"cluster.num_trainers={layout.ranks}", *overrides, *layout.overrides]
    jobs: list[dict[str, Any]] = [
        {
            "warmup": warmup,
            "recipe": str(recipe),
            "overrides": settings,
            "port": address.port,
            "secret": address.secret.hex(),
            "rows": rows,
            "tokens": tokens,
        }
        for warmup, (_, address, _) in zip(warmups, stores, strict=True)
    ]
    results = run_jobs(MODULE, jobs, out, ranks=layout.ranks, what=f"bench comms: {layout.name}", job_s=JOB_S)
    found = {warmup: _worst(of_ranks) for warmup, of_ranks in zip(warmups, results, strict=True)}
    for way in {RELEASES, DROPS} & found.keys():
        ours, releases = (results[warmups.index(one)] for one in (OURS, way))
        found[way]["differing_steps"] = _differing(ours, releases)
    return found


def _differing(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of steps whose figures differ in any bit between the two jobs, on any rank."""
    differing: set[int] = set()
    for of_rank in zip(one, other, strict=True):
        steps = zip(*(found["figures"] for found in of_rank), strict=True)
        differing |= {step for step, (a, b) in enumerate(steps) if a != b}
    return len(differing)


def run_jobs(
    module: str, jobs: Sequence[Mapping[str, Any]], out: Path, *, ranks: int, what: str, job_s: float
) -> list[list[dict[str, Any]]]:
    """Runs jobs in one process for each rank; returns the results by job and rank.

    Args:
        module: See `run_processes`. It calls `forks.run_jobs_of_rank` at its end, or does the same.
        jobs: Fields of each job, as JSON values.
        out: An empty folder, for the jobs and their results.
        ranks: Number of ranks.
        what: Name of the benchmark, for errors.
        job_s: Longest time of a job, in seconds.

    Raises:
        RunError: As `run_processes`.
    """
    file = out / "jobs.json"
    file.write_text(json.dumps(jobs), encoding="utf-8")
    run_processes(module, [str(file)], out, ranks=ranks, what=what, timeout_s=job_s * len(jobs))
    return [
        [json.loads((out / f"{number}_{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
        for number in range(len(jobs))
    ]


def run_processes(module: str, arguments: Sequence[str], out: Path, *, ranks: int, what: str, timeout_s: float) -> None:
    """Runs a module on every rank, on its GPU (`gpu_variables`): ``python -m MODULE RANK ARGUMENTS...``.

    Args:
        module: The module's name.
        arguments: Arguments after the rank.
        out: Folder in which the ranks leave their errors, as ``*.error``.
        ranks: Number of ranks.
        what: Name of the benchmark, for errors.
        timeout_s: Longest time, in seconds.

    Raises:
        RunError: If a rank fails, or does not end in time.
    """
    processes = [
        subprocess.Popen(
            module_command(module, str(rank), *arguments),
            env={
                **os.environ,
                **env.actor_env("trainer", out.name, 1.0),
                **env.DETERMINISTIC,
                **_FORKS,
                **gpu_variables(rank, ranks),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(timeout=timeout_s) for process in processes]
    except subprocess.TimeoutExpired:
        raise RunError(f"{what} did not end within {timeout_s:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        complaints = [path.read_text(encoding="utf-8").strip().splitlines()[-1] for path in sorted(out.glob("*.error"))]
        raise RunError(f"{what} failed: {'; '.join(complaints) or 'a rank died'}")


def _worst(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    heaviest = max(ranks, key=lambda found: found["warm_bytes"] + found["late_bytes"])
    keys = ("warm_bytes", "late_bytes", "growth_bytes", "predicted_bytes", "kernel_bytes", "freed_bytes")
    slowest = ("warmup_s", "step_s", "release_s", "rebuild_s", "cycle_s", "cycles_growth_bytes")
    return {key: heaviest[key] for key in keys if key in heaviest} | {
        key: max(found[key] for found in ranks) for key in slowest if key in heaviest
    }


def rows(layout: str, found: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Returns the table of one layout."""
    total = {way: figures["warm_bytes"] + figures["late_bytes"] for way, figures in found.items()}
    ours = found[OURS]
    made = [
        gpu_row(f"{layout}: NCCL's growth in the first 3 steps", "MiB", ours["late_bytes"] / MIB, at_most(2)),
        *(
            gpu_row(f"{layout}: the same after {way}", "MiB", found[way]["late_bytes"] / MIB, at_least(0))
            for way in found
            if way not in (OURS, NOTHING, RELEASES)
        ),
        gpu_row(f"{layout}: growth with kernels and all", "MiB", ours["growth_bytes"] / MIB, at_least(0)),
        gpu_row(
            f"{layout}: memory after 3 steps, against every group",
            "MiB",
            total[OURS] / MIB,
            at_most(0.25),
            total[EVERY] / MIB,
        ),
        gpu_row(f"{layout}: the same, against nothing", "MiB", total[OURS] / MIB, at_most(0.8), total[NOTHING] / MIB),
        gpu_row(
            f"{layout}: seconds, against every group", "s", ours["warmup_s"], at_most(0.5), found[EVERY]["warmup_s"]
        ),
        gpu_row(
            f"{layout}: step, against Megatron's defaults", "s", ours["step_s"], at_most(1.02), found[NOTHING]["step_s"]
        ),
    ]
    off = abs(ours["predicted_bytes"] / ours["warm_bytes"] - 1) if ours["warm_bytes"] else float("nan")
    made.append(gpu_row(f"{layout}: prediction off by", "", off, at_most(0.15)))
    if RELEASES in found:
        made += release_rows(layout, found[RELEASES])
    return made


def release_rows(name: str, cycle: Mapping[str, float]) -> list[Row]:
    """Returns the table of a job that releases communicators."""
    taken = cycle["warm_bytes"] + cycle["late_bytes"] - cycle["kernel_bytes"]
    return [
        gpu_row(
            f"{name}: released for a rollout, of all but NCCL's kernels",
            "MiB",
            cycle["freed_bytes"] / MIB,
            at_least(0.95),
            taken / MIB,
        ),
        gpu_row(f"{name}: release and rebuild", "s", cycle["cycle_s"], at_most(3)),
        gpu_row(f"{name}: steps that differ from a run without releases", "", cycle["differing_steps"], at_most(0)),
        gpu_row(f"{name}: growth over 18 cycles", "MiB", cycle["cycles_growth_bytes"] / MIB, at_most(2)),
    ]
