"""Runs the main job on GPUs, and compares a larger model's sync, offload, steps, saves and memory with plain ones.

Uses all GPUs of this machine, at most four. A single GPU runs only the main job, with trainer and vLLM on it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

import rl_safe_workers
from benchmarks.gpus import count_gpus, gpu_bytes, gpu_memory_mib, gpu_row
from benchmarks.table import Row, at_least, at_most
from rl_safe_workers import env
from rl_safe_workers.checkpoint.folders.step_tracker import TRACKER
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.driver.outputs import metrics as names
from rl_safe_workers.driver.outputs.ledger import LATE_BYTES
from rl_safe_workers.driver.run import with_absolute_paths
from rl_safe_workers.errors import ResourceError, RunError
from rl_safe_workers.lifecycle import FREE_BYTES, Phase
from rl_safe_workers.own_process import module_command
from rl_safe_workers.ranks import Role
from rl_safe_workers.recipe import load_recipe
from rl_safe_workers.worlds.store import serve_store

RECIPE = Path(rl_safe_workers.__file__).parents[1] / "recipes" / "quickstart_gpu.yaml"
_SPLIT = ("cluster.num_trainers=2", "cluster.num_rollouts=2", "megatron.expert_model_parallel_size=2")
PLACEMENTS: Mapping[str, Sequence[str]] = {
    "1_GPU_colocated": ("cluster.colocated=true",),
    "2_GPUs": (),
    "2_GPUs_colocated": ("cluster.colocated=true", *_SPLIT),
    "4_GPUs": _SPLIT,
}
"""Overrides of the recipe, by placement. The first character of a name is the number of GPUs."""
HOSTS = os.environ.get("RL_SAFE_BENCH_HOSTS", "one")
"""The hosts that NCCL sees in some benchmarks: ``one``, ``two`` with two ranks each, or one per rank (``apart``)."""
LARGE = SeededModelConfig(
    num_hidden_layers=10,
    hidden_size=2048,
    intermediate_size=4096,
    moe_intermediate_size=768,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=64,
    num_experts_per_tok=4,
)
"""A model of 3.1 B parameters."""
NEEDED = ("context", "communicators", "other")
"""Owners whose memory stays on the device after an offload and a sleep."""
LAST_STEPS = 5
JOB_S, RUN_S, INTERRUPTED_S = 500.0, 240.0, 60.0
RANKS = "benchmarks.gpu_ranks"
CHECKPOINT = "RL_SAFE_BENCH_CHECKPOINT"
"""Environment variable: the checkpoint that a job loads."""
BROADCAST_BYTES = "RL_SAFE_BENCH_BROADCAST_BYTES"
"""Environment variable: the number of bytes that a job broadcasts."""


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs everything that the GPUs of this machine allow. Takes about ten minutes and 100 GiB of disk.

    Args:
        report: Takes a line of progress after each part.

    Raises:
        ResourceError: If there is no GPU.
        RunError: If a part fails.
    """
    gpus = count_gpus()
    if gpus < 1:
        raise ResourceError("bench gpu: needs a GPU; there is none")
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as folder:
        rows = [row for placement in placements(gpus) for row in main_job(Path(folder), placement, report)]
        if gpus >= 4:
            rows.append(resume(Path(folder), report))
        return rows + (larger_model(Path(folder), gpus, report) if gpus >= 2 else [])


def placements(gpus: int) -> list[str]:
    """Returns the names in `PLACEMENTS` that fit the number of GPUs. The placement for one GPU fits only one GPU."""
    return [name for name in PLACEMENTS if min(gpus, 2) <= int(name[0]) <= gpus]


def gpu_variables(rank: int, ranks: int) -> dict[str, str]:
    """Returns the environment variables that give a rank its GPU.

    If there are fewer GPUs than ranks, ranks share GPUs. NCCL then believes that ranks on one GPU are on different
    hosts, connected by sockets. With two GPUs, ranks 0 and 1 are on one host, 2 and 3 on another. See also `HOSTS`.
    """
    gpus = count_gpus() or ranks
    ranks_of_host = 1 if HOSTS == "apart" else gpus
    visible = os.environ.get(env.CUDA_VISIBLE_DEVICES) or ",".join(map(str, range(gpus)))
    variables = {env.CUDA_VISIBLE_DEVICES: visible.split(",")[rank % gpus]}
    if ranks_of_host < ranks:
        variables |= {"NCCL_HOSTID": f"host{rank // ranks_of_host}", "NCCL_SOCKET_IFNAME": "lo"}
    return variables


def main_job(folder: Path, placement: str, report: Callable[[str], None], overrides: Sequence[str] = ()) -> list[Row]:
    """Runs the recipe in one placement, with more overrides, in a folder below ``folder`` with the placement's name."""
    found = run_recipe(folder / placement, [*PLACEMENTS[placement], *overrides])
    report(f"{placement}: {', '.join(f'{key} {value:.3g}' for key, value in found.items())}")
    figures = [
        ("reward gain", "", "gain", at_least(2)),
        ("logprob gap, median of the worst step", "nat", "median_gap", at_most(0.005)),
        ("logprob gap, largest of all steps", "nat", "largest_gap", at_most(0.03)),
        ("late bytes of communicators", "B", "late_bytes", at_most(0)),
        ("exit", "s", "exit_s", at_most(8)),
        ("processes left", "", "processes", at_most(0)),
        ("GPU memory left", "MiB", "gpu_mib", at_most(0)),
        ("free before rollout, of what should be", "", "free_share", at_least(0.97)),
        ("weights not proved, and syncs redone", "", "unproved", at_most(0)),
    ]
    return [
        gpu_row(f"{placement.replace('_', ' ')}: {name}", unit, found[key], goal)
        for name, unit, key, goal in figures
        if key in found
    ]


def run_recipe(folder: Path, overrides: Sequence[str]) -> dict[str, float]:
    """Runs the quickstart for GPUs in an empty folder, and measures it from outside."""
    folder.mkdir()
    command = module_command("rl_safe_workers", "run", str(RECIPE), "trainer.run_name=bench", *overrides)
    before_mib = gpu_memory_mib()
    bystanders = _processes_of(folder)
    code, complaint = _run(command, folder)
    ended_s = time.time()
    left, left_mib = _processes_of(folder) - bystanders, max(0, gpu_memory_mib() - before_mib)
    if code != 0:
        reason = (complaint.strip().splitlines() or ["it says nothing"])[-1]
        raise RunError(f"bench gpu: {' '.join(overrides)} ended with exit code {code}: {reason}")
    run_dir = folder / "outputs" / "bench"
    records = _read_lines(run_dir / "metrics.jsonl")
    (tracker,) = folder.rglob(TRACKER)
    rewards = [record[names.REWARD_MEAN] for record in records]
    found = {
        "gain": mean(rewards[-LAST_STEPS:]) / rewards[0],
        "median_gap": max(record[names.LOGPROB_GAP_MEDIAN] for record in records),
        "largest_gap": max(record[names.LOGPROB_GAP_MAX] for record in records),
        "first_gap": records[0][names.LOGPROB_GAP_MEDIAN],
        "late_bytes": max(record.get(LATE_BYTES, 0.0) for record in records),
        "exit_s": ended_s - tracker.stat().st_mtime,
        "processes": float(left),
        "gpu_mib": float(left_mib),
    }
    if any(record.get(names.PROVED) for record in records):
        found["unproved"] = sum(record[name] for record in records for name in (names.NOT_PROVED, names.REDONE))
    if "cluster.colocated=true" in overrides:
        found["free_share"] = free_share(_read_lines(run_dir / "device_memory.jsonl"), total_bytes=gpu_bytes())
    return found


def _run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Runs a command in a folder; returns its exit code and what it wrote to stderr."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, complaint = process.communicate(timeout=RUN_S)
    except subprocess.TimeoutExpired:
        # If it were killed, it could not end its own processes.
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=INTERRUPTED_S)
        raise RunError(f"bench gpu: a run did not end within {RUN_S:.0f} s") from None
    return process.returncode, complaint


def _read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _processes_of(folder: Path) -> int:
    """Returns the number of living processes that work in a folder."""
    found = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += Path(process.cwd()).is_relative_to(folder) and process.status() != psutil.STATUS_ZOMBIE
    return found


def free_share(events: Sequence[Mapping[str, Any]], *, total_bytes: int) -> float:
    """Returns the free share of the memory that trainer and sleeping rollout rank can give back, after an offload.

    They cannot give back contexts, communicators and loaded kernels. The share is that of the worst pair of ranks,
    after its last offload.
    """
    rollouts = {e["rank"]: e["bytes"] for e in _last(events, Role.ROLLOUT, Phase.ROLLOUT)}
    shares: list[float] = []
    for trainer in _last(events, Role.TRAINER, Phase.OFFLOAD):
        needed = sum(held.get(k, 0) for held in (trainer["bytes"], rollouts[trainer["rank"]]) for k in NEEDED)
        shares.append(trainer["bytes"][FREE_BYTES] / (total_bytes - needed))
    return min(shares)


def _last(events: Sequence[Mapping[str, Any]], role: Role, phase: Phase) -> list[Mapping[str, Any]]:
    """Returns the last event of each rank."""
    found = {e["rank"]: e for e in sorted(events, key=lambda e: e["end_s"]) if (e["role"], e["phase"]) == (role, phase)}
    return [found[rank] for rank in sorted(found)]


def resume(folder: Path, report: Callable[[str], None]) -> Row:
    """Counts the digests of the parameters when two ranks and four ranks load the colocated run's checkpoint."""
    folder = folder / "2_GPUs_colocated"
    (checkpoint,) = folder.rglob("global_step_20")
    digests = set()
    for ranks in (2, 4):
        overrides = [
            f"model.path={next(folder.glob('models/*'))}",
            f"cluster.num_trainers={ranks}",
            f"megatron.expert_model_parallel_size={ranks}",
        ]
        digests.add(run_ranks("digest", overrides, variables={CHECKPOINT: str(checkpoint)})["digest"])
    report(f"resume on 4 GPUs: {len(digests)} digest(s)")
    return gpu_row("saved on 2 (EP2), loaded on 4 (EP4): digests of all parameters", "", len(digests), at_most(1))


def make_model(path: Path, spec: SeededModelConfig) -> None:
    """Makes a seeded model in bf16 in a separate process, so that its memory is freed."""
    make = module_command("rl_safe_workers.models.seeded", str(path), spec.model_dump_json(), "bfloat16")
    subprocess.run(make, check=True, timeout=RUN_S)


def larger_model(folder: Path, gpus: int, report: Callable[[str], None]) -> list[Row]:
    """Measures sync, steps, offload and saves of a 3 B model, with two trainers and rollouts on the remaining GPUs."""
    model = folder / "large"
    started_s = time.monotonic()
    make_model(model, LARGE)
    report(f"large model made in {time.monotonic() - started_s:.0f} s")
    overrides = [
        f"model.path={model}",
        "cluster.num_trainers=2",
        "megatron.expert_model_parallel_size=2",
        "actor.ppo_micro_batch_size_per_gpu=2",
        "data.max_response_length=448",
        f"trainer.default_local_dir={folder / 'large_checkpoints'}",
    ]
    found = run_ranks("speeds", overrides, rollouts=min(gpus, 4) - 2)
    report(f"large model: {json.dumps(found)}")
    found |= run_ranks("saves", overrides)
    report(f"large model, saved: {json.dumps(found)}")
    offloaded = found["device_bytes"][Phase.OFFLOAD]
    free = offloaded[FREE_BYTES] / (gpu_bytes() - sum(offloaded[owner] for owner in NEEDED))
    rows = [
        gpu_row("3 B: training step", "s", found["step"], at_most(1.05), found["bare_step"]),
        gpu_row("3 B: free after offload, of what should be", "", free, at_least(0.97)),
    ]
    speeds = [
        ("offload against a pinned copy", "moved_bytes", "offload", "to_host", 0.8),
        ("onload against a pinned copy", "moved_bytes", "onload", "to_device", 0.8),
        ("save against plain writes", "checkpoint_bytes", "save", "plain_write", 0.7),
        ("weight sync against an NCCL broadcast", "weight_bytes", "sync", "broadcast", 0.6),
    ]
    for name, size, ours, peer, bound in speeds:
        if ours in found:
            rates = [found[size] / 2**30 / found[timed] for timed in (ours, peer)]
            rows.append(gpu_row(f"3 B: {name}", "GiB/s", rates[0], at_least(bound), rates[1]))
    rows.append(
        gpu_row(
            "3 B: blocked by an async save, against a sync save", "s", found["blocked"], at_most(0.1), found["save"]
        )
    )
    return rows


def run_ranks(
    job: str, overrides: Sequence[str], *, rollouts: int = 0, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Runs a job of ``gpu_ranks`` on GPUs (`gpu_variables`), trainers first; returns training rank 0's figures.

    Args:
        job: Name of a method of `gpu_ranks.Trainer`.
        overrides: Overrides of the recipe.
        rollouts: Number of rollout ranks.
        variables: Variables for the ranks' environment.
    """
    config = with_absolute_paths(load_recipe(RECIPE, overrides))
    config.cluster.num_rollouts = rollouts
    text, run_id = config.model_dump_json(), uuid.uuid4().hex
    roles = [("trainer", rank) for rank in range(config.cluster.num_trainers)]
    roles += [("rollout", rank) for rank in range(rollouts)]
    store, address, _ = serve_store("127.0.0.1", timeout=timedelta(minutes=5))
    processes = []
    for number, (role, rank) in enumerate(roles):
        own = env.actor_env(role, run_id, config.rollout.kv_cache_gib) | gpu_variables(number, len(roles))
        command = module_command(RANKS, role, str(rank), str(address.port), job, text)
        environment = {**os.environ, **own, **(variables or {})}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        assert process.stdin is not None, "a pipe"
        process.stdin.write(f"{address.secret.hex()}\n")  # other users can read the command line
        process.stdin.flush()
        processes.append(process)
    try:
        outputs = _outputs(processes, roles, job)
    finally:
        for process in processes:
            process.kill()
        del store
    found: dict[str, Any] = json.loads(outputs[0].strip().splitlines()[-1])
    return found


def _outputs(processes: Sequence[subprocess.Popen[str]], roles: Sequence[tuple[str, int]], job: str) -> list[str]:
    """Waits for all processes, or until the first one fails; returns their outputs."""
    with ThreadPoolExecutor(len(processes)) as pool:
        waiting = {pool.submit(p.communicate, timeout=JOB_S): i for i, p in enumerate(processes)}
        outputs = [""] * len(processes)
        for done in as_completed(waiting):
            number = waiting[done]
            try:
                outputs[number], complaint = done.result()
            except subprocess.TimeoutExpired:
                complaint = f"it did not end within {JOB_S:.0f} s"
            if processes[number].returncode != 0:
                for process in processes:
                    process.kill()
                role, rank = roles[number]
                reason = "\n".join(complaint.strip().splitlines()[-12:]) or "it says nothing"
                raise RunError(f"bench gpu: {job} failed on {role} {rank}: {reason}")
    return outputs
