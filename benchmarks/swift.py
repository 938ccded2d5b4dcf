"""Compares ms-swift's Megatron jobs with and without our plugin: exits, late communicators, failures, on two GPUs.

Needs two GPUs, ms-swift and Transformer Engine. Jobs of one part run side by side, four at a time, stock jobs beside
ours, with the same meter. Memory is measured per process. ``python -m benchmarks.swift PART... [--logs FILE.tar.gz]``
runs some parts. If it is interrupted, it prints the rows of the parts that have ended.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.gpus import count_gpus, gpu_memory_mib, gpu_row
from benchmarks.host_meter import TURNS, leave_first_turn_to
from benchmarks.script import median_with_bounds
from benchmarks.swift_jobs import (
    COLOCATED,
    EXPORT,
    FIRST_STEPS,
    GENERATE,
    GRPO,
    ON_CPU,
    PLOT,
    RANKS_OF_NODE,
    SAVE,
    STEP,
    STOP,
    SYNC,
    TRAINED,
    TRAINED_STEPS,
    TRAINING,
    VLLM,
    SwiftJob,
    free_port,
    read_lines,
    run_jobs,
    variables_of_ranks,
)
from benchmarks.table import Row, at_least, at_most, exit_code, print_table, write_json
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import ResourceError, RunError
from rl_safe_workers.models.hf_reader import HfReader
from rl_safe_workers.models.seeded import create_seeded_model

MIB = 2**20
GPUS = 2
EP2 = ("--expert_model_parallel_size", "2")
PP2 = ("--pipeline_model_parallel_size", "2")
LAYOUTS: dict[str, tuple[Sequence[str], int]] = {"EP2": (EP2, 1), "PP2": (PP2, 1), "EP2, two hosts of two": (EP2, 2)}
"""Arguments and nodes, by name. With two nodes, expert data parallelism is 2."""
OURS, STOCK, WARMED = "ours", "stock", "stock with nccl_comm_warmup"
WAYS = (OURS, STOCK, WARMED)
JOBS, CYCLES = 5, 50
FAULTS = ("raise", "kill", "hang")
FAULTY_CALLS = {"step": f"{STEP}:1", "save": "shards:0", "generation": f"{GENERATE}:1", "weight export": f"{SYNC}:1"}
"""Calls in which the meter causes a fault, e.g. the second step, or the first save once it has begun."""
GRPO_STEPS, RESUMED_STEPS = 5, 7
TIMED_STEPS, UNTIMED_STEPS = (6, 2) if ON_CPU else (20, 3)
"""Number of timed steps in turns, and number of steps before them that do not count."""
LORA = {"tuner_type": "lora", "target_modules": ["all-linear"], "lora_rank": 4, "merge_lora": False}
"""Arguments of Ray mode. With full training, stock ms-swift exports weights from memory that it has freed."""
FAULTY_RANK = 1
TIMEOUT_S, GRACE_S, CUT_S = 20.0, 10.0, 120.0
EXIT_S = 5.0
LIMIT_S, GRPO_LIMIT_S, BROKEN_LIMIT_S, CYCLES_LIMIT_S = 150.0, 270.0, 240.0, 300.0
_PHASES = (
    "world",
    "bootstrap",
    "outside",
    "start",
    "convert",
    "rollout",
    "sync",
    "logprob",
    "train",
    "save",
    "teardown",
)
DEADLINES = {"timeouts": dict.fromkeys(_PHASES, 120)}
"""Our settings in jobs that should succeed. Beside other jobs on the same GPUs, ending the groups can take a minute."""
_BROKEN = ("rollout", "sync", "logprob", "train", "save")
SHORT = {"timeouts": {**DEADLINES["timeouts"], "teardown": 5, **dict.fromkeys(_BROKEN, TIMEOUT_S)}}
Report = Callable[[str], None]


def measure(report: Report, parts: Sequence[str] = (), folder: Path | None = None) -> list[Row]:
    """Runs parts. If none is named, runs all but ``smoke``.

    Args:
        report: Takes a line of progress.
        parts: Names of `PARTS`.
        folder: Folder in which the jobs run and log; None for a temporary folder.

    Raises:
        ResourceError: If there are fewer than two GPUs.
    """
    if not ON_CPU and count_gpus() < GPUS:
        raise ResourceError(f"bench swift: needs {GPUS} GPUs")
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl_safe_bench_")))
        inputs, rows = write_inputs(folder / "inputs"), list[Row]()
        for name in parts or OF_ALL:
            if STOP.is_set():
                break
            try:
                rows += PARTS[name](folder / name, inputs, report)
            except RunError as error:
                report(str(error))
                rows.append(gpu_row(f"part {name}: failed", "", 1, at_most(0)))
        return rows


def write_inputs(folder: Path) -> Path:
    """Writes a tiny Qwen3-MoE, 64 short conversations, and 64 texts for pretraining; returns the folder."""
    if not folder.exists():
        create_seeded_model(folder / "model", SeededModelConfig(), dtype="bfloat16")
        turns = [(f"{i} + {i}", f"{2 * i}") for i in range(64)]
        answers = [{"role": "assistant", "content": f"{question} = {answer}"} for question, answer in turns]
        rows = [
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            for question, answer in turns
        ]
        for name, messages in (("data.jsonl", rows), ("texts.jsonl", [[answer] for answer in answers])):
            lines = (json.dumps({"messages": each}) for each in messages)
            (folder / name).write_text("\n".join(lines), encoding="utf-8")
    return folder


def training(
    folder: Path, inputs: Path, name: str, *more: str, command: str = "sft", data: str = "data.jsonl", **options: Any
) -> SwiftJob:
    """Returns a job that trains three steps and saves."""
    args = ["--model", str(inputs / "model"), "--dataset", str(inputs / data), *TRAINING, *more]
    options = {"settings": DEADLINES, **options}
    return SwiftJob(
        name=name, folder=folder / name.replace(" ", "_").replace(",", ""), command=command, args=args, **options
    )


def export(folder: Path, name: str, *args: str, ours: bool = True) -> SwiftJob:
    """Returns a job that exports at expert parallelism 2."""
    place = folder / name.replace(" ", "_")
    return SwiftJob(name=name, folder=place, command="export", args=[*args, *EP2], ours=ours, settings=DEADLINES)


def smoke(folder: Path, inputs: Path, report: Report) -> list[Row]:
    """Runs one job of ours and one stock job."""
    own, stock = (training(folder, inputs, way, *EP2, ours=way == OURS) for way in (OURS, STOCK))
    run_jobs([own, stock], report, limit_s=LIMIT_S)
    return [*_ends([own], [stock]), *_same_losses(own, stock), *_late_rows("EP2", {OURS: own, STOCK: stock}, report)]


def jobs(folder: Path, inputs: Path, report: Report) -> list[Row]:
    """Runs whole jobs: training and pretraining."""
    own = [training(folder, inputs, f"{OURS} {number}", *EP2) for number in range(JOBS)]
    stock = training(folder, inputs, STOCK, *EP2, ours=False)
    pretraining = [
        training(folder, inputs, f"pt {way}", *EP2, command="pt", data="texts.jsonl", ours=way == OURS)
        for way in (OURS, STOCK)
    ]
    before_mib = 0 if ON_CPU else gpu_memory_mib()
    # Stock jobs run beside ours.
    run_jobs([own[0], stock, *pretraining, *own[1:]], report, limit_s=LIMIT_S)
    left_mib = 0 if ON_CPU else max(0, gpu_memory_mib() - before_mib)
    return [
        *_ends(own, [stock]),
        *_same_losses(own[0], stock),
        gpu_row("GPU memory left after all of them", "MiB", left_mib, at_most(0)),
        gpu_row("pt: clean exits", "", pretraining[0].is_clean, at_least(1)),
        gpu_row("pt: seconds of its exit", "s", pretraining[0].exit_s(TRAINED, PLOT), at_most(EXIT_S)),
        *_same_losses(*pretraining, name="pt: "),
    ]


def exports(folder: Path, inputs: Path, report: Report) -> list[Row]:
    """Exports to Megatron's shards, and exports these back to HF."""
    to_mcore = export(folder, "export to mcore", "--model", str(inputs / "model"), "--to_mcore", "true")
    to_hf = export(folder, "export to hf", "--mcore_model", str(to_mcore.output), "--to_hf", "true")
    for job in (to_mcore, to_hf):
        run_jobs([job], report, limit_s=LIMIT_S)
        if not job.is_clean:
            break
    both = (to_mcore, to_hf)
    ended = sum(job.is_clean for job in both)
    differing = _differing(inputs / "model", to_hf.output, report) if ended == len(both) else math.nan
    return [
        gpu_row("exports HF to mcore to HF: clean exits", "", ended, at_least(len(both))),
        gpu_row("exports: tensors that differ after both", "", differing, at_most(0)),
        gpu_row(
            "exports: seconds of the slower exit", "s", _largest(job.exit_s(EXPORT) for job in both), at_most(EXIT_S)
        ),
    ]


def cycles(folder: Path, inputs: Path, report: Report) -> list[Row]:
    """Makes, connects and ends ms-swift's groups many times in the same processes."""
    folder.mkdir(parents=True)
    port, environment = free_port(), {**os.environ, **variables_of_ranks()}
    command = [sys.executable, "-m", "benchmarks.swift_cycles"]
    processes = []
    for rank in range(GPUS):
        with (folder / f"out{rank}.json").open("wb") as out, (folder / f"node{rank}.log").open("wb") as log:
            arguments = [*command, str(rank), str(GPUS), str(port), str(CYCLES)]
            processes.append(subprocess.Popen(arguments, cwd=folder, env=environment, stdout=out, stderr=log))
    ended_by_s, statuses = time.monotonic() + CYCLES_LIMIT_S, list[int | None]()
    try:
        while time.monotonic() < ended_by_s and not STOP.is_set():
            time.sleep(0.1)
            statuses = [process.poll() for process in processes]
            if None not in statuses or any(statuses):
                break
    finally:
        for process in processes:
            process.kill()
            process.wait()
    report(f"cycles: statuses {statuses}")
    found = [read_lines(folder / f"out{rank}.json") for rank in range(GPUS)]
    done = min(map(len, found))
    if any(statuses) or done == 0:
        logs = [(folder / f"node{rank}.log").read_text(encoding="utf-8").strip()[-1500:] for rank in range(GPUS)]
        report("\n".join(logs))
    if done == 0:
        raise RunError(f"bench swift: no cycle has ended; the ranks ended with {statuses}")
    down = [cycle["down_s"] for figures in found for cycle in figures]
    up = [cycle["up_s"] for figures in found for cycle in figures[1:]]
    kept = max(figures[-1]["kept"] - figures[0]["kept"] for figures in found) / MIB
    held = max(figures[0]["held"] for figures in found) / MIB
    groups = min(cycle["groups"] for figures in found for cycle in figures)
    return [
        gpu_row("cycles that end well", "", done, at_least(CYCLES)),
        gpu_row("groups connected in each", "", groups, at_least(1)),
        gpu_row("world, groups and bootstrap: median after the first", "s", _median(up), at_most(EXIT_S)),
        gpu_row("teardown: slowest of all cycles and ranks", "s", max(down), at_most(EXIT_S)),
        gpu_row("outside torch while the groups are there", "MiB", held, at_least(0)),
        gpu_row(f"more after the last teardown than after the first, of {done}", "MiB", kept, at_most(32)),
    ]


def late_bytes(folder: Path, inputs: Path, report: Report, *, nodes: int) -> list[Row]:
    """Measures the memory that collectives take in the first steps, three ways, in the layouts with so many nodes."""
    found: dict[str, dict[str, SwiftJob]] = {}
    for name, (sizes, of_nodes) in LAYOUTS.items():
        if of_nodes == nodes:
            found[name] = {
                way: training(
                    folder,
                    inputs,
                    f"{name} {way}",
                    *sizes,
                    *(["--nccl_comm_warmup", "true"] if way == WARMED else []),
                    ours=way == OURS,
                    nodes=nodes,
                )
                for way in WAYS
            }
    run_jobs([job for ways in found.values() for job in ways.values()], report, limit_s=LIMIT_S)
    return [row for name, ways in found.items() for row in _late_rows(name, ways, report)]


def grpo(folder: Path, inputs: Path, report: Report) -> list[Row]:
    """Runs GRPO with vLLM on the trainers' GPUs: five steps and a save with communicators given away, and a resume."""
    giving = _grpo(folder, inputs, "grpo giving", *_until(GRPO_STEPS), settings={**DEADLINES, "release_comms": True})
    run_jobs([giving], report, limit_s=GRPO_LIMIT_S)
    resumed = _grpo(
        folder,
        inputs,
        "grpo resumed",
        *_until(RESUMED_STEPS),
        *("--mcore_model", str(giving.output / f"checkpoint-{GRPO_STEPS}"), "--finetune", "false"),
    )
    if giving.is_clean:
        run_jobs([resumed], report, limit_s=GRPO_LIMIT_S)
    connected = (
        min(((r["bootstrap"]["bytes"] or 0) - (r["kernel_bytes"] or 0) for r in giving.records()), default=0) / MIB
    )
    given = min((r["given_bytes"] for r in giving.records()), default=0) / MIB
    return [
        gpu_row(f"grpo: clean exits, {GRPO_STEPS} steps and a save", "", giving.is_clean, at_least(1)),
        gpu_row("grpo: steps logged", "", len(giving.losses), at_least(GRPO_STEPS)),
        gpu_row("grpo: resumed: clean exits", "", resumed.is_clean, at_least(1)),
        gpu_row("grpo: resumed: steps more", "", len(resumed.calls(STEP)) / GPUS, at_least(RESUMED_STEPS - GRPO_STEPS)),
        gpu_row("grpo: communicators after the bootstrap, without kernels", "MiB", connected, at_least(0)),
        gpu_row(
            "grpo: part of it that is given to generation",
            "",
            given / connected if connected else math.nan,
            at_least(0.95),
        ),
    ]


def grpo_turns(folder: Path, inputs: Path, report: Report) -> list[Row]:
    """Runs GRPO with our steps and stock's in turns: measures late communicators, and the seconds of a step."""
    turns = folder / "turns"
    folder.mkdir(parents=True)
    for rank in range(GPUS):
        leave_first_turn_to(Path(f"{turns}{rank}"), had_the_last=OURS)
    steps = ["--train_iters", str(UNTIMED_STEPS + TIMED_STEPS), "--save_steps", "1000"]
    own, stock = (
        _grpo(
            folder,
            inputs,
            f"grpo {way}",
            *steps,
            ours=way == OURS,
            variables={TURNS: f"{turns}{{rank}}:{way}:{other}"},
        )
        for way, other in ((OURS, STOCK), (STOCK, OURS))
    )
    run_jobs([own, stock], report, limit_s=GRPO_LIMIT_S)
    ratios = [_seconds_of_steps(job)[UNTIMED_STEPS:] for job in (own, stock)]
    return [
        gpu_row("grpo: jobs in turns: clean exits", "", own.is_clean + stock.is_clean, at_least(2)),
        *_late_rows("grpo EP2", {OURS: own, STOCK: stock}, report),
        *_step_rows("grpo", *ratios),
    ]


def grpo_failures(folder: Path, inputs: Path, report: Report) -> list[Row]:
    """Kills rank 1 in GRPO's generation, weight export, step and save, in stock jobs and in ours."""
    places = ("generation", "weight export", "step", "save")
    return _broken(
        "grpo",
        {
            (way, f"{place}, kill"): _grpo(
                folder, inputs, f"grpo {way} {place}", ours=way == OURS, settings=SHORT, fault=_fault(place, "kill")
            )
            for way in (STOCK, OURS)
            for place in places
        },
        report,
    )


def ray_mode(folder: Path, inputs: Path, report: Report) -> list[Row]:
    """Runs GRPO in ms-swift's Ray mode, ours and stock: three steps and a save."""
    config = {
        **LORA,
        "reward_funcs": ["brief"],
        "colocate_groups": [["train", "rollout"]],
        "train": {"gpus": GPUS},
        # ms-swift 4.6.0 enables LoRA in its engines by default. The engines then refuse its trainers' merged weights.
        "rollout": {"gpus": GPUS, "vllm_tensor_parallel_size": 1, "vllm_enable_lora": False, **VLLM},
    }
    jobs = [
        training(
            folder,
            inputs,
            f"ray {way}",
            *EP2,
            *GRPO,
            command="rlhf",
            data="data.jsonl",
            ours=way == OURS,
            config=config,
        )
        for way in (OURS, STOCK)
    ]
    run_jobs(jobs, report, limit_s=GRPO_LIMIT_S)
    saved = [len(list(job.output.rglob("latest_checkpointed_iteration.txt"))) for job in jobs]
    return [
        gpu_row("ray: clean exits of ours", "", jobs[0].is_clean, at_least(1)),
        gpu_row("ray: clean exits of stock", "", jobs[1].is_clean, at_least(0)),
        gpu_row("ray: steps of ours", "", len(jobs[0].losses), at_least(TRAINED_STEPS)),
        gpu_row("ray: checkpoints of ours", "", saved[0], at_least(1)),
        *_same_losses(*jobs, name="ray: "),
    ]


def _grpo(folder: Path, inputs: Path, name: str, *more: str, **options: Any) -> SwiftJob:
    return training(folder, inputs, name, *EP2, *GRPO, *COLOCATED, *more, command="rlhf", **options)


def _until(steps: int) -> list[str]:
    return ["--train_iters", str(steps), "--save_steps", str(steps)]


def _seconds_of_steps(job: SwiftJob) -> list[float]:
    """Returns the seconds of each step, on its slowest rank."""
    found: dict[int, float] = {}
    for call in job.calls(STEP):
        found[call.call] = max(call.seconds, found.get(call.call, 0.0))
    return [found[number] for number in sorted(found)]


def _step_rows(name: str, ours: Sequence[float], stock: Sequence[float]) -> list[Row]:
    count = min(len(ours), len(stock))
    rows = [gpu_row(f"{name}: steps in turns", "", count, at_least(TIMED_STEPS))]
    if count < 2:
        return rows
    bounds = median_with_bounds([one / other for one, other in zip(ours, stock, strict=False)])
    return [
        *rows,
        gpu_row(f"{name}: step, medians", "s", median(ours[:count]), at_most(1.03), median(stock[:count])),
        gpu_row(f"{name}: step, median of the ratios", "", bounds["step_ratio"], at_most(1.03)),
        gpu_row(f"{name}: step, lower end of its 95 % interval", "", bounds["step_ratio_low"], at_least(0)),
        gpu_row(f"{name}: step, upper end of its 95 % interval", "", bounds["step_ratio_high"], at_most(1.03)),
    ]


def failures(folder: Path, inputs: Path, report: Report, *, place: str) -> list[Row]:
    """Makes one rank raise, die or hang in a step or a save, in stock jobs and in ours. Cuts them after two minutes."""
    broken = {
        (way, how): training(
            folder,
            inputs,
            f"{way} {place} {how}",
            *EP2,
            ours=way == OURS,
            settings=SHORT,
            fault=_fault(place, how),
        )
        # The stock job that hangs takes longest.
        for how in reversed(FAULTS)
        for way in (STOCK, OURS)
    }
    return _broken(place, broken, report)


def _fault(place: str, how: str) -> str:
    return f"{FAULTY_CALLS[place]}:{FAULTY_RANK}:{how}"


def _broken(place: str, broken: dict[tuple[str, str], SwiftJob], report: Report) -> list[Row]:
    """Runs jobs with faults, and returns their rows. The keys are the way (stock or ours) and the fault."""
    run_jobs(list(broken.values()), report, limit_s=BROKEN_LIMIT_S, cut_s=CUT_S)
    rows: list[Row] = []
    named = kept = left = 0
    for (way, how), job in broken.items():
        goal = at_most(TIMEOUT_S + GRACE_S) if way == OURS else at_least(0)
        row = f"{place}, {how}: {way}, from the fault to the end"
        struck_s = job.fault_s
        if struck_s is None:
            report(f"{job.name}: ended before its fault: {job.log.strip()[-1500:]}")
            rows.append(gpu_row(row, "s", math.nan, goal))
            continue
        seconds = job.ended_s - struck_s
        by_us = f"failed on training rank {FAULTY_RANK}" in job.log
        root_cause = job.log.rpartition("Root Cause")[2] if "Root Cause" in job.log else ""
        by_torchrun = f"rank      : {FAULTY_RANK} " in root_cause
        names = " and ".join(who for who, told in (("us", by_us), ("torchrun", by_torchrun)) if told) or "nobody"
        status = job.statuses[0]
        report(
            f"{job.name}: {'cut' if status is None else f'status {status}'} after {seconds:.1f} s, rank {FAULTY_RANK} "
            f"named by {names}, {job.left} left"
        )
        if way == OURS:
            named += by_us or by_torchrun
            kept += status not in (None, 0)
            left += job.left
        rows.append(gpu_row(row, "s", seconds, goal))
    of = len(broken) // 2
    return [
        *rows,
        gpu_row(f"{place}: ours: the rank is named, of {of}", "", named, at_least(of)),
        gpu_row(f"{place}: ours: a status of failure, of {of}", "", kept, at_least(of)),
        gpu_row(f"{place}: ours: processes left", "", left, at_most(0)),
    ]


def _ends(own: Sequence[SwiftJob], stock: Sequence[SwiftJob]) -> list[Row]:
    slowest = [_largest(job.exit_s(TRAINED, PLOT) for job in group) for group in (own, stock)]
    first = [
        _largest(call.seconds for job in group for call in job.calls(STEP) if call.call == 0) for group in (own, stock)
    ]
    saves = [_median([call.seconds for job in group for call in job.calls(SAVE)]) for group in (own, stock)]
    return [
        gpu_row("clean exits of ours", "", sum(job.is_clean for job in own), at_least(len(own))),
        gpu_row("exit of the slowest rank: ours", "s", slowest[0], at_most(EXIT_S)),
        gpu_row("exit of the slowest rank: stock", "s", slowest[1], at_least(0)),
        gpu_row("first step of the slowest rank: ours", "s", first[0], at_most(TIMEOUT_S)),
        gpu_row("first step of the slowest rank: stock", "s", first[1], at_least(0)),
        gpu_row("save of the tiny model: ours", "s", saves[0], at_least(0)),
        gpu_row("save of the tiny model: stock", "s", saves[1], at_least(0)),
    ]


def _same_losses(own: SwiftJob, stock: SwiftJob, *, name: str = "") -> list[Row]:
    pairs = list(zip(own.losses, stock.losses, strict=False))
    apart = _largest(abs(one - other) for one, other in pairs) if len(pairs) == TRAINED_STEPS else math.nan
    return [gpu_row(f"{name}largest difference of a loss to stock's", "nat", apart, at_most(0.01))]


def _late_rows(layout: str, ways: dict[str, SwiftJob], report: Report) -> list[Row]:
    """Returns rows of the memory that collectives take in each window, in MiB, on the heaviest rank."""
    rows: list[Row] = []
    for way, job in ways.items():
        records = [record for record in job.records() if record["steps"] >= FIRST_STEPS]
        ranks = RANKS_OF_NODE * job.nodes
        name = f"{layout}: {way}: ranks that made {FIRST_STEPS} steps"
        rows.append(gpu_row(name, "", len(records), at_least(ranks)))
        if len(records) < ranks:
            continue
        heaviest = max(records, key=lambda record: record["taken"].get(STEP, 0))
        for window, groups in heaviest["by_group"].items():
            report(f"{layout}, {way}, {window}: {json.dumps({name: size // MIB for name, size in groups.items()})}")
        for entry in records[0].get("ledger", []):
            if len(entry["ranks"]) > 1:
                sizes = f"{(entry['bytes'] or 0) // MIB} MiB, predicted {entry['predicted_bytes'] // MIB}"
                report(f"{layout}, {way}: {entry['group']} {entry['op_class']}: {sizes}")
        late = max(record["taken"].get(STEP, 0) for record in records) / MIB
        before = max(sum(size for name, size in record["taken"].items() if name != STEP) for record in records) / MIB
        outside = [call.outside_torch for call in job.calls(STEP) if call.outside_torch is not None]
        goal = at_most(0) if way == OURS else at_least(0)
        rows.append(gpu_row(f"{layout}: {way}: late bytes of communicators, 3 steps", "MiB", late, goal))
        if way != OURS:
            rows.append(gpu_row(f"{layout}: {way}: taken from the model to the first step", "MiB", before, at_least(0)))
        else:
            own = max((record["bootstrap"]["bytes"] or 0) for record in records) / MIB
            rows.append(gpu_row(f"{layout}: {way}: taken by the bootstrap, with kernels", "MiB", own, at_least(0)))
            expected = max(record["bootstrap"]["predicted_bytes"] for record in records) / MIB
            rows.append(gpu_row(f"{layout}: {way}: the same as predicted", "MiB", expected, at_least(0)))
        rows.append(
            gpu_row(f"{layout}: {way}: outside torch after 3 steps", "MiB", max(outside, default=0) / MIB, at_least(0))
        )
    return rows


def _largest(values: Iterable[float]) -> float:
    """Returns the largest figure. Returns NaN without figures, or if a figure is NaN."""
    found = list(values)
    return math.nan if not found or any(map(math.isnan, found)) else max(found)


def _median(values: Sequence[float]) -> float:
    """Returns the median; NaN without values."""
    return median(values) if values else math.nan


def _differing(stock: Path, back: Path, report: Report) -> int:
    """Counts tensors of two HF checkpoints that differ in any bit, or that one of them lacks."""
    import torch

    one, other = HfReader(stock), HfReader(back)
    names = set(one.names) & set(other.names)
    lacking = sorted(set(one.names) ^ set(other.names))
    differing = [n for n in names if not torch.equal(one.load_one_hf_weight(n), other.load_one_hf_weight(n))]
    report(f"exports: {len(names)} tensors in both, {lacking} in one alone, {differing} differ")
    return len(lacking) + len(differing)


PARTS: dict[str, Callable[[Path, Path, Report], list[Row]]] = {
    "smoke": smoke,
    "jobs": jobs,
    "exports": exports,
    "cycles": cycles,
    "late_bytes": partial(late_bytes, nodes=1),
    "late_bytes_of_hosts": partial(late_bytes, nodes=2),
    "failures_in_steps": partial(failures, place="step"),
    "failures_in_saves": partial(failures, place="save"),
    "grpo": grpo,
    "grpo_turns": grpo_turns,
    "grpo_failures": grpo_failures,
    "ray": ray_mode,
}
OF_ALL = [name for name in PARTS if name != "smoke"]
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""


def main() -> int:
    """Runs the parts that the command line names, prints their table, and keeps the jobs' files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=PARTS, help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--logs", type=Path, help="keep the jobs' logs and records in this .tar.gz, and the rows beside it"
    )
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: STOP.set())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as name:
        folder = Path(name)
        try:
            for part in arguments.parts or OF_ALL:
                rows += measure(_tell, [part], folder)
        finally:
            if arguments.logs is not None:
                _keep(folder, arguments.logs)
                write_json(rows, arguments.logs.with_suffix("").with_suffix(".json"))
            if rows:
                print_table(rows, Console(force_interactive=False, width=160))
    return INTERRUPTED if STOP.is_set() else exit_code(rows)


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _keep(folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:gz") as kept:
        for path in sorted(folder.rglob("*")):
            if (path.suffix in (".log", ".jsonl", ".json") or path.name == "log") and "hf" not in path.relative_to(
                folder
            ).parts:
                kept.add(path, path.relative_to(folder))


if __name__ == "__main__":
    sys.exit(main())
