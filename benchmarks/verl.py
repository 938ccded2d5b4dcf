"""verl's own job with its engines and with ours, on two GPUs: steps in turns, memory, saves, resumes and faults.

Needs verl, its vLLM, Megatron-Bridge and Transformer Engine in this Python; ``scripts/gpu_parts`` packs them. Takes
some twelve minutes. The jobs of a part run side by side.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import psutil

import rl_safe_workers
from benchmarks import host_meter
from benchmarks.gpus import count_gpus, gpu_row
from benchmarks.host_jobs import Job, wait_for
from benchmarks.script import median_with_bounds
from benchmarks.table import Row, at_least, at_most
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import ResourceError
from rl_safe_workers.models.seeded import Family, create_seeded_model

PARTS = os.environ.get("RL_SAFE_BENCH_PARTS", "steps+saves+faults;variants+engine_faults").split(";")
"""The parts to run, one after another; those joined by a plus run side by side."""
MBRIDGE = "RL_SAFE_BENCH_MBRIDGE_SITE"
"""Environment variable: a folder with the megatron-core that mbridge knows, 0.16.1. Without it mbridge is left out."""
ROOT = Path(rl_safe_workers.__file__).parents[1]
STOCK, OURS, GIVING = "stock", "ours", "ours, release_comms"
STEPS, LEFT_OUT = 20, 3
JOB_S = float(os.environ.get("RL_SAFE_BENCH_JOB_S", "300"))
QUIET_WITHIN_S = 200.0
"""How long steps wait for the end of the parts beside them. What still runs then is starting, and leaves GPUs alone."""
STOCK_AFTER_FAULT_S, TIMEOUT_S, ALLOWED_S = 120.0, 15.0, 10.0
MIB = 2**20
MODEL = SeededModelConfig(
    num_hidden_layers=8,
    hidden_size=512,
    intermediate_size=1024,
    moe_intermediate_size=512,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=16,
)
_SMALL_MODEL = MODEL.model_copy(update={"num_hidden_layers": 2, "hidden_size": 256, "num_experts": 8})
MODELS = {
    "moe": (Family.QWEN3, MODEL),
    "small_moe": (Family.QWEN3, _SMALL_MODEL),
    "small_dense": (Family.QWEN2, _SMALL_MODEL.model_copy(update={"num_experts": 0})),
}
"""Family and sizes of the models, made from a seed."""
_ACTOR = "actor_rollout_ref.actor"
_FAMILY = (
    f"{_ACTOR}.megatron.vanilla_mbridge=false",
    "actor_rollout_ref.model.use_remove_padding=true",
    # verl asks for FlashAttention, which is not there; cuDNN's takes packed sequences, too.
    f"++{_ACTOR}.megatron.override_transformer_config.attention_backend=auto",
    # Needs APEX.
    f"++{_ACTOR}.megatron.override_transformer_config.gradient_accumulation_fusion=false",
)
_SMALL = (
    "actor_rollout_ref.rollout.ignore_eos=true",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.06",
    # A job that measures free memory while another takes some would end.
    f"+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes={512 * MIB}",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "data.dataloader_num_workers=0",
    "ray_kwargs.ray_init.num_cpus=8",
    "+ray_kwargs.ray_init.include_dashboard=false",
)
_FIXED_LENGTHS = (
    "data.train_batch_size=16",
    f"{_ACTOR}.ppo_mini_batch_size=16",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "data.max_response_length=64",
)
_WITHOUT_VLLM = ("actor_rollout_ref.model.external_lib=tests.verl.echo_rollout",)
FAULTS: Mapping[str, str] = {
    "training": "update_actor:2:1:kill",
    "save": "save_checkpoint:1:1:kill",
}
"""`host_meter.FAULT` of each fault, in jobs without vLLM."""
ENGINE_FAULTS: Mapping[str, str] = {
    "weight export": "update_weights:2:1:kill",
    "generation": "",
    "engine": "",
}
"""The same in jobs with vLLM. The empty ones come from outside while engines generate: to a rank, or to an engine."""


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs verl's jobs.

    Args:
        report: Takes a line of progress after each part.

    Raises:
        ResourceError: If there are fewer than two GPUs.
    """
    if count_gpus() < 2:
        raise ResourceError("bench verl: needs two GPUs")
    parts: Mapping[str, Callable[[_Jobs], list[Row]]] = {
        "steps": steps,
        "saves": saves,
        "variants": variants,
        "faults": lambda jobs: faults(jobs, FAULTS),
        "engine_faults": lambda jobs: faults(jobs, ENGINE_FAULTS),
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rl_safe_verl_") as name:
        jobs = _Jobs(Path(name), report)
        try:
            for side_by_side in PARTS:
                rows += _measure_together(side_by_side.split("+"), parts, jobs)
        finally:
            jobs.end()
    return rows


def _measure_together(
    names: Sequence[str], parts: Mapping[str, Callable[[_Jobs], list[Row]]], jobs: _Jobs
) -> list[Row]:
    """Measures parts side by side. `steps` are timed when the others have ended."""
    jobs.is_quiet.clear()
    with ThreadPoolExecutor(len(names)) as pool:
        found = {name: pool.submit(parts[name], jobs) for name in names}
        for name in sorted(names, key=lambda name: name == "steps"):
            if name == "steps":
                jobs.is_quiet.set()
            failure = found[name].exception()
            jobs.report(f"{name}: {'done' if failure is None else repr(failure)}")
    rows = []
    for name in names:
        failed = found[name].exception() is not None
        rows += [_row(f"part {name}: failed", "", failed, at_most(0))] if failed else found[name].result()
    return rows


class _Jobs:
    """Starts verl's jobs and keeps their folders and models."""

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self.folder, self.report = folder, report
        self.started: dict[str, Job] = {}
        self.is_quiet = threading.Event()
        """Set when no other part runs beside `steps`."""
        self._making = threading.Lock()

    def model(self, name: str) -> Path:
        """Returns the folder of a seeded model of `MODELS`, made once."""
        path = self.folder / name
        family, spec = MODELS[name]
        with self._making:
            if not path.exists():
                create_seeded_model(path, spec, dtype="bfloat16", family=family)
        return path

    def start(
        self,
        name: str,
        who: str,
        *overrides: str,
        model: str = "small_moe",
        variables: Mapping[str, str] | None = None,
        fault: str = "",
    ) -> Job:
        """Starts a job of the small recipe.

        Args:
            name: A name that no other job has.
            who: `STOCK`, `OURS` or `GIVING`.
            overrides: Of verl's configuration.
            model: One of `MODELS`.
            variables: Environment variables.
            fault: See `host_meter.FAULT`.
        """
        folder = self.folder / re.sub(r"\W+", "_", name)
        stock = who == STOCK
        glue = "benchmarks.verl_glue"
        plugin = "rl_safe_workers.adapters.verl.plugin"
        command = [
            "bash",
            str(ROOT / "recipes/verl/quickstart.sh"),
            *_FAMILY,
            *_SMALL,
            f"hydra.run.dir={folder}/hydra",
            f"trainer.default_local_dir={folder}/checkpoints",
            *([f"+ray_kwargs.ray_init._temp_dir=/tmp/r{len(self.started)}"]),
            *(["actor_rollout_ref.rl_safe.release_comms=true"] if who == GIVING else []),
            *overrides,
        ]
        own = {
            "DEVICE": "cuda",
            "HYDRA_FULL_ERROR": "1",
            "MODEL": str(self.model(model)),
            "PYTHON": sys.executable,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "VERL_USE_EXTERNAL_MODULES": glue if stock else f"{plugin},{glue}",
            **({"ENTRY": "stock"} if stock else {}),
        }
        job = Job(name, command, folder, {**own, **(variables or {})}, fault=fault)
        self.started[name] = job
        return job

    def end(self) -> None:
        """Ends what still runs."""
        for job in self.started.values():
            job.end()


def metrics_of(output: str) -> dict[int, dict[str, float]]:
    """Returns the metrics that verl's console logger printed, by step."""
    found = {}
    for line in output.splitlines():
        if match := re.search(r"step:(\d+) - (.*)", line):
            items = re.findall(r"([\w/@.]+):([-+.\de]+)", match[2])
            found[int(match[1])] = {name: float(value) for name, value in items}
    return found


def steps(jobs: _Jobs) -> list[Row]:
    """Steps of both in turns, and the memory that each process takes outside of torch."""
    turns = jobs.folder / "turns"
    turns.mkdir()
    lengths = [*_FIXED_LENGTHS, *_WITHOUT_VLLM, "data.max_response_length=256"]
    lengths += [
        "+actor_rollout_ref.rollout.custom.tokens=256",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS // 2}",
    ]
    with host_meter.no_turns(turns):
        found = {}
        for who, other in ((STOCK, OURS), (OURS, STOCK)):
            variables = {host_meter.TURNS: f"{turns}:{who}:{other}"}
            found[who] = jobs.start(f"{who} steps", who, *lengths, model="moe", variables=variables)
        jobs.is_quiet.wait(QUIET_WITHIN_S)
    wait_for(list(found.values()), JOB_S)
    rows = [_exit_row(jobs, job) for job in found.values()]
    both = found[STOCK], found[OURS]
    for name, label in (("update_actor", "actor update"), ("update_weights", "weight sync")):
        stock, ours = (_slowest(job, name)[LEFT_OUT:] for job in both)
        if not stock or len(stock) != len(ours):
            rows.append(_row(f"{label}: steps of both", "", min(len(stock), len(ours)), at_least(STEPS - LEFT_OUT)))
            continue
        bounds = median_with_bounds([a / b for a, b in zip(ours, stock, strict=True)])
        goal = at_most(1.03)
        rows.append(_row(f"{label}: median of the steps' ratios", "", bounds["step_ratio"], goal))
        rows.append(_row(f"{label}: lower end of its 95 % interval", "", bounds["step_ratio_low"], at_least(0)))
        rows.append(_row(f"{label}: upper end of its 95 % interval", "", bounds["step_ratio_high"], goal))
        rows.append(_row(f"{label}: median", "s", median(ours), at_most(9e9), median(stock)))
    after = {who: _memory(job) for who, job in found.items()}
    for who in (STOCK, OURS):
        jobs.report(f"{who}: { ({key: round(value / MIB) for key, value in after[who].items()}) }")
        jobs.report(f"{who}: updates {[round(seconds, 4) for seconds in _slowest(found[who], 'update_actor')]}")
    for point, label in (("init_model", "set-up"), ("update_actor 2", "3 steps")):
        ours_mib, stock_mib = (after[who].get(point, float("nan")) / MIB for who in (OURS, STOCK))
        goal = at_most(0.6) if label == "3 steps" else at_most(9e9)
        rows.append(_row(f"outside torch after {label}", "MiB", ours_mib, goal, stock_mib))
    growth = [_growth_mib(after[who]) for who in (OURS, STOCK)]
    rows.append(_row("growth outside torch in the first 3 steps", "MiB", growth[0], at_most(9e9), growth[1]))
    late = [of_step.get("rl_safe/late_allocations", 9e9) for of_step in metrics_of(found[OURS].output()).values()]
    rows.append(_row("late collectives", "", max(late, default=9e9), at_most(0)))
    stock_saves, our_saves = (_slowest(job, "save_checkpoint") or [float("nan")] for job in both)
    rows.append(_row("save", "s", median(our_saves), at_most(1), median(stock_saves)))
    return rows


def saves(jobs: _Jobs) -> list[Row]:
    """Saves in the background, and resumes at another layout of the checkpoints of both."""
    few = [*_FIXED_LENGTHS, *_WITHOUT_VLLM, "trainer.total_training_steps=3", "trainer.save_freq=1"]
    in_background = [*few, f"{_ACTOR}.checkpoint.async_save=true"]
    first = {who: jobs.start(f"{who} saves", who, *few) for who in (STOCK, OURS)}
    asynchronous = {who: jobs.start(f"{who} saves async", who, *in_background) for who in (STOCK, OURS)}
    wait_for([*first.values(), *asynchronous.values()], JOB_S)
    rows = [_exit_row(jobs, job) for job in (*first.values(), *asynchronous.values())]
    for label, by in (("save", first), ("async save", asynchronous)):
        stock, ours = (median(_slowest(by[who], "save_checkpoint") or [float("nan")]) for who in (STOCK, OURS))
        rows.append(_row(f"without vLLM: {label}", "s", ours, at_most(1), stock))
        for who in (STOCK, OURS):
            tracker = by[who].folder / "checkpoints/latest_checkpointed_iteration.txt"
            step = int(tracker.read_text()) if tracker.exists() else -1
            rows.append(_row(f"{who}, {label}: step of the tracker", "", step, at_least(3)))
    resumed: dict[tuple[str, str], Job] = {}
    more = [*_FIXED_LENGTHS, *_WITHOUT_VLLM, "trainer.total_training_steps=4", "trainer.save_freq=-1"]
    for saved_by in (STOCK, OURS):
        for who in (STOCK, OURS):
            resumed[saved_by, who] = jobs.start(
                f"{who} resumes {saved_by}",
                who,
                *more,
                f"trainer.resume_from_path={first[saved_by].folder}/checkpoints/global_step_3",
                "trainer.resume_mode=resume_path",
                f"{_ACTOR}.megatron.expert_model_parallel_size=1",
            )
    wait_for(list(resumed.values()), JOB_S)
    for saved_by in (STOCK, OURS):
        both = [metrics_of(resumed[saved_by, who].output()).get(4, {}) for who in (OURS, STOCK)]
        for key in ("actor/pg_loss", "actor/grad_norm"):
            ours, stock = (of.get(key, float("nan")) for of in both)
            jobs.report(f"saved by {saved_by}, EP2 to EP1: {key} ours {ours!r} stock {stock!r}")
            rows.append(
                _row(f"resumed at EP1, saved by {saved_by}: {key}, difference", "", abs(ours - stock), at_most(0))
            )
    rows += [_exit_row(jobs, job) for job in resumed.values()]
    return rows


def variants(jobs: _Jobs) -> list[Row]:
    """Three steps with mbridge, with a dense Qwen2.5, and with communicators given to the rollout."""
    few = ["trainer.total_training_steps=3", "trainer.save_freq=3"]
    giving = jobs.start("ours, release_comms", GIVING, *few)
    found = [
        giving,
        jobs.start("ours, dense", OURS, *few, f"{_ACTOR}.megatron.expert_model_parallel_size=1", model="small_dense"),
    ]
    if MBRIDGE in os.environ:
        path = f"{ROOT}:{os.environ[MBRIDGE]}:{os.environ.get('PYTHONPATH', '')}"
        for who in (OURS, STOCK):
            vanilla = f"{_ACTOR}.megatron.vanilla_mbridge=true"
            found.append(jobs.start(f"{who}, mbridge", who, *few, vanilla, variables={"PYTHONPATH": path}))
    wait_for(found, JOB_S)
    rows = []
    for job in found:
        of_steps = metrics_of(job.output()).values()
        late = [of_step.get("rl_safe/late_allocations", 0) for of_step in of_steps]
        gaps = [of_step.get("training/rollout_probs_diff_max", float("nan")) for of_step in of_steps]
        rows += [
            _exit_row(jobs, job),
            _row(f"{job.name}: steps", "", len(of_steps), at_least(3)),
            _row(f"{job.name}: late collectives", "", max(late, default=9e9), at_most(0)),
            _row(f"{job.name}: largest gap of probabilities", "", max(gaps, default=9e9), at_most(0.05)),
        ]
    of_steps = metrics_of(giving.output()).values()
    connected = max((of_step.get("rl_safe/bootstrap_mib", 0) for of_step in of_steps), default=float("nan"))
    released = min((of_step.get("rl_safe/released_mib", 0) for of_step in of_steps), default=0)
    after = _memory(giving)
    jobs.report(f"release_comms: { ({key: round(value / MIB) for key, value in after.items()}) }")
    back_mib = (after.get("update_actor 1", 0) - after.get("update_weights 2", 0)) / MIB
    rows.append(_row("released, by our own figures, of what was connected", "", released / connected, at_least(0.95)))
    rows.append(_row("outside torch, less at rollout, of what was connected", "", back_mib / connected, at_least(0.95)))
    return rows


def faults(jobs: _Jobs, wanted: Mapping[str, str]) -> list[Row]:
    """A training rank or an engine dies. All jobs run side by side."""
    timeouts = [
        f"actor_rollout_ref.rl_safe.timeouts.{phase}={TIMEOUT_S:g}"
        for phase in ("train", "logprob", "sync", "rollout", "save")
    ]
    running: dict[tuple[str, str], Job] = {}
    for fault, meter in wanted.items():
        for who in (OURS, STOCK):
            of_fault = [
                "trainer.total_training_steps=6",
                "trainer.save_freq=1" if fault == "save" else "trainer.save_freq=-1",
            ]
            of_fault += _WITHOUT_VLLM if fault in FAULTS else []
            if not meter:
                of_fault.append("data.max_response_length=512")
            if who == OURS:
                of_fault += timeouts
            running[fault, who] = jobs.start(f"{who}: killed in {fault}", who, *of_fault, fault=meter)
    at_s: dict[Job, float] = {}
    deadline = time.time() + JOB_S
    while time.time() < deadline and any(job.poll() is None for job in running.values()):
        for (fault, who), job in running.items():
            if job not in at_s and job.poll() is None:
                if not wanted[fault]:
                    _kill_while_generating(job, fault)
                for call in job.calls(host_meter.FAULT_NAME):
                    at_s[job] = call.started_s
            limit = STOCK_AFTER_FAULT_S if who == STOCK else STOCK_AFTER_FAULT_S / 2
            if job in at_s and job.poll() is None and time.time() > at_s[job] + limit:
                jobs.report(f"{job.name}: cut off {limit:g} s after the fault")
                jobs.report(_end_of(job))
                job.end()
                job.ended_s = float("inf")
        time.sleep(0.2)
    rows = []
    for (_, who), job in running.items():
        if job not in at_s:
            rows.append(_row(f"{job.name}: the fault came", "", 0, at_least(1)))
            continue
        took_s = (job.ended_s or time.time()) - at_s[job]
        left = job.left() if took_s != float("inf") else []
        named = job.first_line_with("phase ", "of training world", "ActorDiedError", "EngineDeadError", "Error: ")
        jobs.report(f"{job.name}: {took_s:.1f} s, status {job.poll()}, left {len(left)}: {named[:300]}")
        limit = at_most(TIMEOUT_S + ALLOWED_S) if who == OURS else at_most(9e9)
        rows.append(_row(f"{job.name}: ended after", "s", took_s, limit))
        rows.append(_row(f"{job.name}: processes left", "", len(left), at_most(0 if who == OURS else 9e9)))
    return rows


def _kill_while_generating(job: Job, fault: str) -> None:
    """Kills rank 1 or an engine, half a second after the second weight sync."""
    syncs = [call for call in job.calls("update_weights") if call.rank == 1]
    if len(syncs) < 2 or time.time() < syncs[1].started_s + syncs[1].seconds + 0.5:
        return
    if fault == "generation":
        pid = syncs[1].pid
    else:
        pid = next(process.pid for process in job.processes() if "EngineCore" in " ".join(process.cmdline()))
    record = host_meter.Call(
        name=host_meter.FAULT_NAME,
        call=1,
        rank=1,
        pid=pid,
        started_s=time.time(),
        seconds=0,
        outside_torch=None,
        torch_reserved=0,
    )
    host_meter.append(record, job.calls_folder / "outside.jsonl")
    psutil.Process(pid).send_signal(signal.SIGKILL)


def _end_of(job: Job) -> str:
    """Returns the last lines of a job that did not end well."""
    return "\n".join([job.name, *job.output().splitlines()[-12:]])


def _slowest(job: Job, name: str) -> list[float]:
    """Returns the seconds of each call, on its slowest rank."""
    by_call: dict[int, float] = {}
    for call in job.calls(name):
        by_call[call.call] = max(by_call.get(call.call, 0.0), call.seconds)
    return [by_call[number] for number in sorted(by_call)]


def _memory(job: Job) -> dict[str, float]:
    """Returns device memory outside of torch after each call and before the first update, on the rank that has most."""
    found: dict[str, float] = {}
    last: dict[int, float] = {}
    for call in job.calls():
        if call.outside_torch is None:
            continue
        name = call.name if call.name == "init_model" else f"{call.name} {call.call}"
        if name == "update_actor 0":
            found["update_actor 0 begins"] = max(found.get("update_actor 0 begins", 0), last.get(call.rank, 0))
        found[name] = max(found.get(name, 0), call.outside_torch)
        last[call.rank] = call.outside_torch
    return found


def _growth_mib(after: Mapping[str, float]) -> float:
    return (after.get("update_actor 2", float("nan")) - after.get("update_actor 0 begins", float("nan"))) / MIB


def _exit_row(jobs: _Jobs, job: Job) -> Row:
    status = job.poll()
    if status != 0:
        jobs.report(f"{job.name}: exit status {status}")
        jobs.report(_end_of(job))
    return _row(f"{job.name}: exit status", "", 99 if status is None else abs(status), at_most(0))


def _row(name: str, unit: str, ours: float, goal: Any, peer: float | None = None) -> Row:
    return gpu_row(f"verl, {name}", unit, ours, goal, peer)
