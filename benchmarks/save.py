"""Times saves and loads of an MoE checkpoint against megatron-core's, of large tensors against torch.save, and audits.

Workload A: 48 layers x 128 experts, weights and two moments, hidden size 16: 18,720 sharded tensors on each of four
gloo ranks (EP2, expert data-parallel 2). Workload B: 4 GiB in large tensors. Workload C: 2 layers x 64 experts, hidden
size 512, so that each expert has megabytes. The peer saves as the frameworks do: fully parallel and with validation. It
loads with megatron-core's default, which is faster here than the fully-parallel load.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.save_ranks import LATER, RANKS
from benchmarks.table import Goal, Row, at_most, machine_in_words
from rl_safe_workers.errors import RunError
from rl_safe_workers.own_process import module_command
from rl_safe_workers.versions import installed_versions

ROUNDS = 2
"""Number of rounds. In each, we and the peer run in new processes, in alternating order."""
JOB_S = 600.0
AUDITED_TENSORS = 100_000

Seconds = dict[str, list[float]]


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs everything. Takes some minutes, and 9 GiB of disk in the folder for temporary files.

    Args:
        report: Takes a line of progress after each part.

    Raises:
        RunError: If a part fails.
    """
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as folder:
        ours, peer, different = _workload_a(Path(folder), report)
        audit_s = _audit(Path(folder) / "round_0" / "ours_0" / "global_step_1")
        report(f"audit of A: {audit_s:.2f} s")
    experts = _run("experts", report)
    large = _run("large", report)
    scaling = _run("scaling", report)
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as folder:
        large_audit_s = _audit(_many_tensors(Path(folder)))
        report(f"audit of {AUDITED_TENSORS} tensors: {large_audit_s:.2f} s")
    return _rows(ours, peer, different, experts, large, scaling, audit_s, large_audit_s)


def _workload_a(folder: Path, report: Callable[[str], None]) -> tuple[Seconds, Seconds, float]:
    ours: Seconds = {}
    peer: Seconds = {}
    for number in range(ROUNDS):
        round_folder = folder / f"round_{number}"
        round_folder.mkdir()
        for job, seconds in [("ours", ours), ("peer", peer)][:: 1 if number % 2 == 0 else -1]:
            for name, values in _run(job, report, round_folder).items():
                seconds.setdefault(name, []).extend(values)
    different = sum(_run("interop", report, folder / "round_0")["different"])
    return ours, peer, different


def _run(job: str, report: Callable[[str], None], folder: Path | None = None) -> Seconds:
    """Runs a job on all ranks; returns the seconds of the slowest rank for each timed thing."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as own:
            return _run(job, report, Path(own))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = module_command("benchmarks.save_ranks")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(port), job, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=JOB_S) for process in processes]
    except subprocess.TimeoutExpired:
        raise RunError(f"bench save: {job} did not end within {JOB_S:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (_, complaint)) in enumerate(zip(processes, outputs, strict=True)):
        if process.returncode != 0:
            reason = (complaint.strip().splitlines() or ["it says nothing"])[-1]
            raise RunError(f"bench save: {job} failed on rank {rank}: {reason}")
    seconds: Seconds = json.loads(outputs[0][0].strip().splitlines()[-1])
    report(f"{job}: {', '.join(f'{name} {_listed(values)}' for name, values in seconds.items())}")
    return seconds


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3g}" for value in values)


def _audit(directory: Path) -> float:
    """Audits a checkpoint; returns the seconds of the whole command, including the start of Python."""
    started_s = time.perf_counter()
    done = subprocess.run(module_command("rl_safe_workers", "audit", str(directory)), capture_output=True, text=True)
    seconds = time.perf_counter() - started_s
    if done.returncode != 0:
        raise RunError(f"bench save: the audit of {directory} ended with exit code {done.returncode}: {done.stdout}")
    return seconds


def _many_tensors(folder: Path) -> Path:
    """Makes a checkpoint of many small tensors; returns its folder."""
    code = (
        "import sys, torch\n"
        "from torch.distributed import checkpoint\n"
        f"state = {{f'tensor.{{i}}': torch.full((4,), float(i)) for i in range({AUDITED_TENSORS})}}\n"
        "checkpoint.save(state, checkpoint_id=sys.argv[1], no_dist=True)\n"
        "torch.save({}, sys.argv[1] + '/common.pt')\n"
    )
    subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", code, str(folder)], check=True, capture_output=True)
    (folder / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}', encoding="utf-8"
    )
    return folder


def _rows(
    ours: Seconds,
    peer: Seconds,
    different: float,
    experts: Seconds,
    large: Seconds,
    scaling: Seconds,
    audit_s: float,
    large_audit_s: float,
) -> list[Row]:
    by_layers = [median(scaling[f"{layers}x128"]) for layers in (24, 48, 96)]
    by_experts = [median(scaling[f"48x{experts}"]) for experts in (64, 128, 256)]
    later = median(peer["later"])
    figures: list[tuple[str, str, float, float | None, Goal, int]] = [
        ("A, first save", "s", median(ours["first"]), median(peer["first"]), at_most(0.10), ROUNDS),
        ("A, later saves", "s", median(ours["later"]), later, at_most(0.025), len(ours["later"])),
        ("A, blocked by an async save", "s", median(ours["blocked"]), later, at_most(0.01), len(ours["blocked"])),
        ("A, load", "s", median(ours["load"]), median(peer["load"]), at_most(0.10), ROUNDS),
        ("A, read each other's at EP2, EP4, EP1: different", "", different, None, at_most(0), 6),
        ("B, save, peer: torch.save and fsync", "s", median(large["ours"]), median(large["plain"]), at_most(1.25), 4),
        ("C, later saves", "s", median(experts["ours later"]), median(experts["peer later"]), at_most(1), LATER),
        *(
            (f"C, {name}", "s", median(seconds), median(experts["peer loads its own"]), at_most(1.25), len(seconds))
            for name, seconds in (
                ("megatron-core loads our save, peer: its own save", experts["peer loads ours"]),
                ("load, peer: megatron-core, its own save", experts["ours loads"]),
            )
        ),
        ("A, cost per doubling of layers, worst", "", _worst_growth(by_layers), None, at_most(2.2), 5),
        ("A, cost per doubling of experts, worst", "", _worst_growth(by_experts), None, at_most(1.3), 5),
        ("audit of A", "s", audit_s, None, at_most(2), 1),
        (f"audit of {AUDITED_TENSORS} tensors", "s", large_audit_s, None, at_most(10), 1),
    ]
    machine, versions = machine_in_words(), installed_versions()
    return [
        Row(name=n, unit=u, ours=o, peer=p, goal=g, runs=r, machine=machine, versions=versions)
        for n, u, o, p, g, r in figures
    ]


def _worst_growth(costs: Sequence[float]) -> float:
    return max(after / before for before, after in itertools.pairwise(costs))
