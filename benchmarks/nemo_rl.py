"""Runs NeMo RL's own script with our workers, beside stock NeMo RL, on 2 GPUs.

    NEMO_RL_SRC=CHECKOUT python -m benchmarks.nemo_rl OUT_DIR PART...

`PARTS` lists the parts. The logs are packed into OUT_DIR. `LIMIT_S` and `TURNS_S` bound the jobs that run at the same
time. Ctrl-C ends all jobs. The table then has the figures that were measured before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, median

from rich.console import Console

from benchmarks import host_meter
from benchmarks.gpu import LARGE
from benchmarks.gpus import count_gpus, gpu_bytes, gpu_row
from benchmarks.host_jobs import WIDE_MODEL, on_one_numa_node
from benchmarks.host_meter import FAULT_NAME
from benchmarks.nemo_rl_jobs import IS_CUT, RECIPES, Job, Run, keep_logs, module_search_path, run_jobs
from benchmarks.nemo_rl_meter import (
    DIGESTS,
    GENERATE,
    LOGPROB,
    OURS,
    PATHS,
    PROVED_REFIT,
    RECEIVE,
    REFIT,
    SAVE,
    SEND,
    STATE,
    STOCK,
    TRAIN,
    WORLD,
    digest,
    inside,
)
from benchmarks.script import median_with_bounds
from benchmarks.table import Goal, Row, at_least, at_most, exit_code, print_table
from benchmarks.weight_sync import MODELS
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NemoRlTimeouts
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import ResourceError

APART, COLOCATED, ASYNC = "tiny-1train-1vllm", "tiny-2train-colocated", "tiny-1train-1vllm-async-1off"
SHORT = {APART: "a", COLOCATED: "c", ASYNC: "y"}
_SECONDS = os.environ.get("RL_SAFE_BENCH_SECONDS")
LIMIT_S, TURNS_S = float(_SECONDS or 270), float(_SECONDS or 550)
"""Time limits in seconds of jobs that run at the same time: most jobs, and two jobs that take steps in turns."""
PLAIN_STEPS, RESUMED_STEPS = 5, 7
_RESUMED = (
    f"grpo.max_num_steps={RESUMED_STEPS}",
    # The scheduler's length follows from the number of steps. Megatron refuses a saved scheduler of another length.
    "++policy.megatron_cfg.scheduler.override_opt_param_scheduler=true",
)
MEASURED_STEPS, FIRST_STEPS = 17, 3
LARGER = "larger"
REFIT_STEPS, LARGEST_GIB = 8, 110
"""Steps of a job whose refits are timed, and the memory of a GPU that trains 5 B parameters alone."""
_EQUAL_WORK = ("policy.megatron_cfg.optimizer.lr=1e-6", "policy.megatron_cfg.optimizer.min_lr=1e-6")
"""Overrides of timed steps. Both jobs must send as many tokens to each expert, so their weights must stay nearly equal.
With 1e-3 they soon differ, because GPU kernels add in any order."""
ASYNC_SAVES, MOST_LAYERS = 4, 64
DEADLINE_S, GRACE_S, CUT_S = 15.0, 10.0, 120.0
FAULTS = {
    "step": f"{TRAIN}:3:1:kill",
    "save": f"{SAVE}:0:1:kill",
    "refit": f"{SEND}:2:1:kill",
    "engine": f"{GENERATE}:2:1:kill",
    "receive": f"{RECEIVE}:2:1:kill",
    "late": f"{PATHS}:0:1:stop",
    "convert": f"{STATE}:0:1:kill",
}
"""The fault of rank 1 of the trainers or engines, by part. In ``late``, the rank never comes to the conversion."""
STANDING_STILL = {
    "o1": f"{TRAIN}:2:1:hang",
    "o2": f"{SAVE}:0:1:hang",
    "o3": f"{SEND}:2:1:stop",
    "o4": f"{GENERATE}:2:1:stop",
    "o5": f"{STATE}:0:1:hang",
}
"""Faults of stock jobs that are explained from outside, by the name of the job."""
EXPLAINS_S = 90.0


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs all parts. Takes about three quarters of an hour.

    Raises:
        ResourceError: If there are fewer than 2 GPUs.
    """
    if count_gpus() < 2:
        raise ResourceError("bench nemo_rl: needs 2 GPUs")
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as name:
        return [row for parts in COMMANDS for row in run_parts(parts, Path(name), Path(name) / "out", report)]


def run_parts(parts: Sequence[str], folder: Path, out: Path, report: Callable[[str], None]) -> list[Row]:
    """Runs parts side by side: at most five of our jobs, and as many stock jobs. A failed part also has a row."""
    _make_model(folder / "tiny")
    faults = [part for part in parts if part in FAULTS]
    measured = {part: partial(PARTS[part], folder, out, report) for part in parts if part not in FAULTS}
    if faults:
        measured[", ".join(faults)] = partial(run_faults, faults, folder, out, report)
    rows: list[Row] = []
    with ThreadPoolExecutor(len(measured)) as pool:
        found = {part: pool.submit(function) for part, function in measured.items()}
    for part, future in found.items():
        if failure := future.exception():
            report(f"{part}: {failure!r}")
            rows.append(gpu_row(f"part {part}: failed", "", 1, at_most(0)))
        else:
            rows += future.result()
    return rows


def _make_model(folder: Path, model: SeededModelConfig | None = None) -> None:
    if folder.exists():
        return
    folder.mkdir(parents=True)
    options = [] if model is None else ["--model", model.model_dump_json()]
    command = [sys.executable, str(RECIPES / "make_tiny.py"), str(folder), *options]
    subprocess.run(command, check=True, timeout=LIMIT_S, env={**os.environ, "PYTHONPATH": module_search_path()})


def _run(
    jobs: Sequence[Job],
    out: Path,
    report: Callable[[str], None],
    limit_s: float = LIMIT_S,
    look: Callable[[Run], None] | None = None,
) -> list[Run]:
    began = time.monotonic()
    runs = run_jobs(jobs, limit_s=limit_s, cut_s=CUT_S, look=look)
    keep_logs(runs, out / f"{'-'.join(job.name for job in jobs)}-{runs[0].number}.tar.gz")
    for run in runs:
        took = (run.gone_s or time.time()) - run.running.started_s
        seconds = ", ".join(
            f"{name} {_worst(run, name)}" for name in (WORLD, LOGPROB, TRAIN, SEND, SAVE, REFIT, GENERATE)
        )
        report(f"{run.job.name}: exit {run.exit_code}{', cut' if run.was_cut else ''} after {took:.0f} s; {seconds}")
        report(f"{run.job.name}: {len(run.left)} left {run.left[:3]}; late {run.late_mib()} MiB; {run.error()[:300]}")
        for number, step in enumerate(run.steps(), 1):
            report(f"{run.job.name}: step {number}: " + ", ".join(f"{key} {value:.5f}" for key, value in step.items()))
    report(f"took {time.monotonic() - began:.0f} s")
    return runs


def _worst(run: Run, name: str) -> str:
    """Returns the seconds of each call on the slowest rank, as text."""
    return " ".join(f"{seconds:.2f}" for seconds in _seconds(run, name)) or "none"


def _seconds(run: Run, name: str, *, net: bool = False) -> list[float]:
    return host_meter.slowest([call for call in run.calls if call.name == name], net=net)


def _communicators_mib(run: Run) -> float:
    """Returns the largest growth of a trainer's memory outside of torch since it made the default group."""
    calls = [call for call in run.calls if call.outside_torch is not None]
    before = {call.rank: call.outside_torch for call in calls if call.name == WORLD}
    after = {call.rank: call.outside_torch for call in calls if call.name == TRAIN}
    grown = [(after[rank] or 0) - (before[rank] or 0) for rank in before.keys() & after.keys()]
    return max(grown) / 2**20 if grown else float("nan")


def _pair(folder: Path, recipe: str, *overrides: str, prefix: str = "", turns: bool = False) -> list[Job]:
    names = {side: f"{prefix}{SHORT[recipe]}{side[0]}" for side in (OURS, STOCK)}
    return [
        Job(
            name=names[side],
            side=side,
            recipe=recipe,
            folder=folder,
            overrides=overrides,
            turns_with=names[other] if turns else "",
        )
        for side, other in ((OURS, STOCK), (STOCK, OURS))
    ]


def _smoke(folder: Path, out: Path, report: Callable[[str], None]) -> list[Row]:
    """Runs two steps of our job and of the stock job."""
    jobs = _pair(folder, APART, "grpo.max_num_steps=2", "checkpointing.save_period=2", prefix="s")
    return _rows_of_pair("smoke", *_run(jobs, out, report, limit_s=150.0), steps=2)


def _placement(recipe: str) -> Callable[[Path, Path, Callable[[str], None]], list[Row]]:
    def run(folder: Path, out: Path, report: Callable[[str], None]) -> list[Row]:
        first = _run(_pair(folder, recipe), out, report)
        rows = _rows_of_pair(recipe, *first, steps=PLAIN_STEPS)
        again = _run(_pair(folder, recipe, *_RESUMED), out, report)
        for run in again:
            side = run.job.side
            rows += [
                gpu_row(f"{recipe}, resumed, {side}: exit code", "", _code(run), at_most(0)),
                gpu_row(f"{recipe}, resumed, {side}: updates", "", len(_seconds(run, TRAIN)), at_most(2)),
                gpu_row(f"{recipe}, resumed, {side}: last step", "", len(run.steps()), at_least(RESUMED_STEPS)),
            ]
        return rows

    return run


def _code(run: Run) -> float:
    return float("nan") if run.exit_code is None else abs(run.exit_code)


def _rows_of_pair(name: str, ours: Run, stock: Run, *, steps: int) -> list[Row]:
    found = {run.job.side: run.steps() for run in (ours, stock)}
    rows = [gpu_row(f"{name}, {run.job.side}: exit code", "", _code(run), at_most(0)) for run in (ours, stock)]
    rows += [
        gpu_row(f"{name}: steps", "", len(found[OURS]), at_least(steps)),
        gpu_row(f"{name}: processes left", "", len(ours.left), at_most(0)),
        gpu_row(f"{name}: late bytes of communicators", "MiB", ours.late_mib(), at_most(0)),
        gpu_row(
            f"{name}: grown outside torch", "MiB", _communicators_mib(ours), at_most(0.6), _communicators_mib(stock)
        ),
    ]
    if all(len(each) >= steps for each in found.values()):
        means = {
            (side, key): [step[key] for step in each]
            for side, each in found.items()
            for key in ("reward", "mean_gap", "largest_gap")
        }
        apart = max(abs(a - b) for a, b in zip(means[OURS, "reward"], means[STOCK, "reward"], strict=False))
        rows += [
            gpu_row(
                f"{name}: mean reward", "", mean(means[OURS, "reward"]), at_least(0.9), mean(means[STOCK, "reward"])
            ),
            gpu_row(f"{name}: rewards of a step apart, at most", "", apart, at_most(0.05)),
            gpu_row(
                f"{name}: mean logprob gap",
                "nat",
                mean(means[OURS, "mean_gap"]),
                at_most(1.1),
                mean(means[STOCK, "mean_gap"]),
            ),
            gpu_row(f"{name}: largest logprob gap", "nat", max(means[OURS, "largest_gap"]), at_most(0.25), None),
        ]
    return rows


def _steps(recipe: str) -> Callable[[Path, Path, Callable[[str], None]], list[Row]]:
    def run(folder: Path, out: Path, report: Callable[[str], None]) -> list[Row]:
        _make_model(folder / LARGER, WIDE_MODEL)
        steps = FIRST_STEPS + MEASURED_STEPS
        # One update of 1,024 samples, so that all steps of both jobs fit into 400 s. A sample has at most 43 tokens, so
        # 512 samples at a time have some 20,000 tokens; see `WIDE_MODEL`.
        overrides = (
            f"grpo.max_num_steps={steps}",
            "grpo.num_prompts_per_step=64",
            "checkpointing.enabled=false",
            "grpo.num_generations_per_prompt=16",
            "policy.train_global_batch_size=1024",
            "policy.train_micro_batch_size=512",
            "policy.logprob_batch_size=512",
            *_EQUAL_WORK,
        )
        pair = [replace(job, model=LARGER) for job in _pair(folder, recipe, *overrides, prefix="t", turns=True)]
        with on_one_numa_node() as cpus:
            report(f"both jobs run on the same {cpus} CPUs")
            ours, stock = _run(pair, out, report, TURNS_S)
        rows = [
            gpu_row(f"{recipe}, in turns, {run.job.side}: exit code", "", _code(run), at_most(0))
            for run in (ours, stock)
        ]
        # A refit in the driver also waits for the engine, in which no code of ours runs. The engine collects garbage,
        # and the driver does not meter that.
        for call, bound in ((TRAIN, 1.03), (REFIT, 1.0), (SEND, 1.0), (RECEIVE, 9e9)):
            for net in (False,) if call == REFIT else (False, True):
                seconds = [_seconds(run, call, net=net)[FIRST_STEPS:steps] for run in (ours, stock)]
                name = f"{recipe}: {call}{' without garbage collection' if net else ''}"
                rows += _rows_of_calls(name, *seconds, at_most(9e9 if net else bound))
        # Our process runs the host's method within ours. These rows tell which of the two a difference comes from.
        for call in (TRAIN, SEND):
            if outer_ms := _outside_ms(ours, call)[FIRST_STEPS:steps]:
                name = f"{recipe}: {call}, ours, outside of the host's method, median"
                rows.append(gpu_row(name, "ms", median(outer_ms), at_most(9e9)))
            inner, plain = (_seconds(*of)[FIRST_STEPS:steps] for of in ((ours, inside(call)), (stock, call)))
            rows += _rows_of_calls(f"{recipe}: {call}, the host's method", inner, plain, at_most(9e9))
        return rows

    return run


def _outside_ms(run: Run, name: str) -> list[float]:
    """Returns the milliseconds of each call of ours in which no rank runs the host's method.

    Before it, they count from the last rank that came. After it, they count from the last rank that ended it.
    """
    outer, inner = (_starts_and_ends(run, each) for each in (name, inside(name)))
    return [
        1e3 * (inner[number][0] - outer[number][0] + outer[number][1] - inner[number][1])
        for number in sorted(outer.keys() & inner.keys())
    ]


def _starts_and_ends(run: Run, name: str) -> dict[int, tuple[float, float]]:
    """Returns the Unix times at which the last rank began and ended each call, by the call's number."""
    found: dict[int, tuple[float, float]] = {}
    for call in run.calls:
        if call.name == name:
            start_s, end_s = found.get(call.call, (0.0, 0.0))
            found[call.call] = max(start_s, call.started_s), max(end_s, call.started_s + call.seconds)
    return found


def _rows_of_calls(name: str, ours: Sequence[float], stock: Sequence[float], goal: Goal) -> list[Row]:
    """Returns rows that compare the seconds of calls; none if one job has no such calls."""
    ratios = [a / b for a, b in zip(ours, stock, strict=False)]
    if not ratios:
        return []
    ratio = median_with_bounds(ratios)
    return [
        gpu_row(f"{name}, medians", "s", median(ours), goal, median(stock)),
        gpu_row(f"{name}, median of {len(ratios)} ratios", "", ratio["step_ratio"], goal),
        gpu_row(f"{name}, lower end of its 95 % interval", "", ratio["step_ratio_low"], goal),
        gpu_row(f"{name}, upper end of its 95 % interval", "", ratio["step_ratio_high"], goal),
    ]


def _refits(transport: str) -> Callable[[Path, Path, Callable[[str], None]], list[Row]]:
    """Returns a part that times our job's refits of a large model. Every other refit is proved.

    Args:
        transport: The setting ``rl_safe.refit_transport``.
    """

    def run(folder: Path, out: Path, report: Callable[[str], None]) -> list[Row]:
        size, model = ("5 B", MODELS["5 B"]) if gpu_bytes() >= LARGEST_GIB * 2**30 else ("3 B", LARGE)
        path = folder / size.replace(" ", "_")
        _make_model(path, model)
        overrides = (
            f"grpo.max_num_steps={REFIT_STEPS}",
            "checkpointing.enabled=false",
            "++rl_safe.prove_sync_freq=2",
            f"++rl_safe.refit_transport={transport}",
        )
        ours, _ = _pair(folder, APART, *overrides, prefix=f"r{transport[0]}")
        (found,) = _run([replace(ours, model=path.name)], out, report, TURNS_S)
        proved, plain = (_seconds(found, PROVED_REFIT)[first::2] for first in (2, 3))
        name = f"refits of {size}, apart, {transport}"
        rows = [gpu_row(f"{name}: exit code", "", _code(found), at_most(0))]
        if plain:
            weights_gib = sum(file.stat().st_size for file in (path / "model").glob("*.safetensors")) / 2**30
            rows += [
                gpu_row(f"{name}: rate of one that is not proved", "GiB/s", weights_gib / median(plain), at_least(0)),
                gpu_row(f"{name}: a proved one, against another", "s", median(proved), at_most(1.25), median(plain)),
            ]
        return rows

    return run


def _async_saves(recipe: str) -> Callable[[Path, Path, Callable[[str], None]], list[Row]]:
    def run(folder: Path, out: Path, report: Callable[[str], None]) -> list[Row]:
        overrides = (
            f"grpo.max_num_steps={ASYNC_SAVES}",
            "checkpointing.save_period=1",
            "policy.megatron_cfg.checkpoint.async_save=true",
            "policy.megatron_cfg.checkpoint.ckpt_assume_constant_structure=true",
            "policy.megatron_cfg.freeze_moe_router=false",
        )
        rows: list[Row] = []
        for each in _run(_pair(folder, recipe, *overrides, prefix="w"), out, report):
            name = f"{recipe}, async saves, {each.job.side}"
            saves = [_digests_of(path) for path in _saves(each)]
            wrong = [len(_not_in(number, each, found)) for number, found in enumerate(saves)]
            report(f"{name}: tensors in each save {[len(found) for found in saves]}, not as they were {wrong}")
            is_ours = each.job.side == OURS
            rows += [
                gpu_row(f"{name}: exit code", "", _code(each), at_most(0)),
                gpu_row(f"{name}: saves", "", len(saves), at_least(ASYNC_SAVES)),
                gpu_row(f"{name}: saves that differ", "", len(set(saves)), at_least(ASYNC_SAVES if is_ours else 0)),
                gpu_row(
                    f"{name}: parameters not as at their moment", "", sum(wrong), at_most(0) if is_ours else at_least(0)
                ),
            ]
        return rows

    return run


def _saves(run: Run) -> list[Path]:
    found = run.job.own.glob("results/step_*/policy/weights/iter_*")
    return sorted(found, key=lambda path: int(path.parents[2].name.removeprefix("step_")))


def _digests_of(checkpoint: Path) -> frozenset[str]:
    """Returns digests of all tensors of a checkpoint, and of the slices of tensors that contain layers or experts."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(checkpoint)
    tensors = {
        key: torch.empty(stored.size, dtype=stored.properties.dtype)
        for key, stored in reader.read_metadata().state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    pieces = [tensors[key] for key in tensors]
    layers = [piece for tensor in pieces if tensor.dim() > 1 and len(tensor) <= MOST_LAYERS for piece in tensor]
    experts = [piece for layer in layers if layer.dim() > 1 and len(layer) <= MOST_LAYERS for piece in layer]
    return frozenset(map(digest, [*pieces, *layers, *experts]))


def _not_in(number: int, run: Run, saved: frozenset[str]) -> list[str]:
    """Returns the parameters that a save lacks, or has with other values."""
    found: dict[str, str] = {}
    for path in run.meter.glob(f"{DIGESTS}-{number}-*.json"):
        found |= json.loads(path.read_text())
    return [name for name, value in found.items() if value not in saved]


def run_faults(kinds: Sequence[str], folder: Path, out: Path, report: Callable[[str], None]) -> list[Row]:
    """Runs jobs at the same time, each with a fault, and times their ends."""
    jobs = []
    for kind in kinds:
        deadlines = [f"++rl_safe.timeouts.{name}={DEADLINE_S:g}" for name in _bounded(kind)]
        own = ["checkpointing.save_period=2"] if kind == "save" else ["checkpointing.enabled=false"]
        for side, more in ((OURS, deadlines), (STOCK, [])):
            jobs.append(
                Job(
                    name=f"{kind}{side[0]}",
                    side=side,
                    recipe=COLOCATED,
                    folder=folder,
                    overrides=[*own, *more, "policy.generation.vllm_cfg.gpu_memory_utilization=0.05"],
                    fault=FAULTS[kind],
                )
            )
    rows: list[Row] = []
    runs = _run(jobs, out, report)
    if "convert" in kinds:
        rows += _after_half_conversion([job for job in jobs if job.name.startswith("convert")], out, report)
    for run in runs:
        fault_s = run.fault_s
        name = f"{run.job.name[:-1]} ({FAULTS[run.job.name[:-1]]}), {run.job.side}"
        if fault_s is None:
            rows.append(gpu_row(f"{name}: the fault happened", "", 0, at_least(1)))
            continue
        ended = float("nan") if run.gone_s is None else run.gone_s - fault_s
        report(f"{name}: ended after {ended:.1f} s, exit {run.exit_code}, left {run.left}; {run.error()}")
        if run.job.side == STOCK:
            seconds = CUT_S if run.gone_s is None else ended
            rows.append(gpu_row(f"{name}: ended after, {CUT_S:.0f}: cut", "s", seconds, at_least(0)))
            if run.gone_s is not None:
                rows.append(_explained_row(run, _explain(run, str(run.job.own)), report))
            continue
        rows += [
            gpu_row(f"{name}: ended after", "s", ended, at_most(DEADLINE_S + GRACE_S)),
            gpu_row(f"{name}: exit code", "", _code(run), at_least(1)),
            gpu_row(f"{name}: names rank 1", "", _names_rank(run), at_least(1)),
            gpu_row(f"{name}: processes left", "", len(run.left) + (run.gone_s is None), at_most(0)),
        ]
    return rows


def _explain(run: Run, *how: str) -> list[str]:
    """Returns the processes that ``rl-safe explain`` blames, in a job without this package."""
    answer = run.running.folder / "explained.json"
    command = [sys.executable, "-m", "rl_safe_workers", "explain", *how, "--json", str(answer)]
    environment = {**os.environ, "PYTHONPATH": module_search_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=EXPLAINS_S, check=False)
    (run.running.folder / "explained.log").write_text(done.stdout + done.stderr)
    found: list[str] = json.loads(answer.read_text())["culprits"]
    return found


def _explained_row(run: Run, culprits: Sequence[str], report: Callable[[str], None]) -> Row:
    (pid,) = {call.pid for call in run.calls if call.name == FAULT_NAME}
    told = (run.running.folder / "explained.log").read_text().splitlines()[:2]
    name = f"stock, {run.job.fault}: explained from outside"
    report(f"{name}: process {pid}: {culprits}; {told}")
    is_it = [bool(re.search(rf"\bprocess {pid}\b", culprit)) for culprit in culprits]
    return gpu_row(f"{name}, 1: right, 0: names nobody, -1: wrong", "", all(is_it) * 2 - 1 if is_it else 0, at_least(1))


def _outside(folder: Path, out: Path, report: Callable[[str], None]) -> list[Row]:
    """Runs stock jobs that come to a standstill; `rl-safe explain --ray` explains each from outside."""
    jobs = [
        Job(
            name=name,
            side=STOCK,
            recipe=COLOCATED,
            folder=folder,
            overrides=[
                f"checkpointing.enabled={str(SAVE in fault).lower()}",
                "checkpointing.save_period=2",
                "policy.generation.vllm_cfg.gpu_memory_utilization=0.05",
            ],
            fault=fault,
        )
        for name, fault in STANDING_STILL.items()
    ]
    culprits: dict[str, list[str]] = {}

    def look(run: Run) -> None:
        culprits[run.job.name] = _explain(run, "--ray", run.ray_address())

    runs = _run(jobs, out, report, look=look)
    return [
        _explained_row(run, culprits[run.job.name], report)
        if run.job.name in culprits
        else gpu_row(f"stock, {run.job.fault}: looked at from outside", "", 0, at_least(1))
        for run in runs
    ]


def _after_half_conversion(jobs: Sequence[Job], out: Path, report: Callable[[str], None]) -> list[Row]:
    """Starts the jobs again. They find the remains of the killed jobs."""
    for job in jobs:
        left = sorted(str(path.relative_to(job.own)) for path in (job.own / "converted").rglob("*"))
        report(f"{job.name} left {left[:8]}")
    runs = _run(
        [replace(job, fault="", overrides=[*job.overrides, "grpo.max_num_steps=1"]) for job in jobs], out, report
    )
    return [
        gpu_row(
            f"started after a half conversion, {run.job.side}: exit code",
            "",
            _code(run),
            at_most(0) if run.job.side == OURS else at_least(0),
        )
        for run in runs
    ]


def _bounded(kind: str) -> list[str]:
    """Returns the phases with short deadlines in a job with a fault: of set-up, only the phase with the fault."""
    names = {"world", "logprob", "train", "save", "sync", "generate"} & set(NemoRlTimeouts.model_fields)
    return sorted(names | ({"convert"} if kind == "late" else set()))


def _names_rank(run: Run) -> int:
    """Counts the lines that name the lost rank, as a training rank or as NeMo RL's worker of that number."""
    return len(re.findall(r"\brank(?:s|\(s\))? \[?1\b|-0-1:", run.running.output()))


PARTS: Mapping[str, Callable[[Path, Path, Callable[[str], None]], list[Row]]] = {
    "smoke": _smoke,
    "apart": _placement(APART),
    "colocated": _placement(COLOCATED),
    "async": _placement(ASYNC),
    "saves-apart": _async_saves(APART),
    "saves-colocated": _async_saves(COLOCATED),
    "steps-apart": _steps(APART),
    "steps-colocated": _steps(COLOCATED),
    "refits": _refits("host"),
    "joint-refits": _refits("joint"),
    "outside": _outside,
}
"""The parts that are not in `FAULTS`."""
COMMANDS = (
    ("apart",),
    ("colocated",),
    ("async",),
    ("steps-colocated",),
    ("steps-apart",),
    ("refits",),
    ("joint-refits",),
    ("saves-colocated",),
    ("saves-apart",),
    ("step", "save", "refit"),
    ("engine", "receive", "late", "convert"),
    ("outside",),
)
"""The parts that run together. Steps in turns take some seven minutes, any other tuple less than five."""


def main() -> int:
    """Runs the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("parts", nargs="+", choices=[*PARTS, *FAULTS], metavar="PART")
    arguments = parser.parse_args()
    console = Console(width=200, highlight=False)
    signal.signal(signal.SIGINT, lambda *_: IS_CUT.set())
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as name:
        rows = run_parts(
            arguments.parts,
            Path(name),
            arguments.out,
            lambda line: console.print(line, soft_wrap=True, markup=False),
        )
    print_table(rows, console)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
