"""Measures the cost and the false alarms of proved weight syncs, with vLLM on CPU; digests on a GPU if there is one.

Trainer and engine are in one process, and buckets are copied instead of sent. A sync is then fastest, so the share of
its proof is the largest possible.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.table import Row, at_least, at_most, machine_in_words
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.rollout.digest import digests_of
from rl_safe_workers.versions import installed_versions

SYNCS, BATCH = 500, 10
"""Number of proved syncs in all, and number of syncs in a turn. Proved and unproved syncs take turns."""
MODEL = SeededModelConfig(num_experts=16, hidden_size=256, moe_intermediate_size=128)
DEAREST, SLOWEST = 0.05, 0.5
"""Largest share of a sync's time for its proof, and lowest speed of digests as a share of the memory bandwidth."""
TENSORS, ELEMENTS, ROUNDS = 2048, {"cpu": 2**15, "cuda": 2**21}, 5
"""Number of bf16 tensors to digest, elements of each by the device, and number of measurements. On a GPU, a tensor has
the size of an expert's matrix."""


def measure(report: Callable[[str], None]) -> list[Row]:
    """Times syncs with and without a proof, in turns. Then times digests.

    Args:
        report: Takes a line of progress for each part.
    """
    from tests.distributed.ranks import run_ranks, values

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        create_seeded_model(path, MODEL)
        ((alarms, proved, plain),) = values(run_ranks(_sync, 1, path, timeout_s=1800.0))
    report(f"{SYNCS} proved syncs: {alarms} alarms, {proved:.4f} s each, {plain:.4f} s without a proof")
    facts: dict[str, Any] = {"machine": machine_in_words(), "versions": installed_versions()}
    return [
        Row(name="false alarms", unit="", ours=alarms, goal=at_most(0), runs=SYNCS, **facts),
        Row(name="seconds of a proof, against a sync's", unit="s", ours=proved - plain, peer=plain,
            goal=at_most(DEAREST), runs=SYNCS, **facts),
        speed_of_digests(torch.device("cpu"), report),
    ]  # fmt: skip


def _sync(rank: int, path: Path) -> tuple[int, float, float]:
    from tests.distributed.proved_engine import in_engine

    return tuple(in_engine(path, _in_turns))  # type: ignore[return-value]


def _in_turns(worker: Any, weights: dict[str, torch.Tensor]) -> tuple[int, float, float]:
    """Returns the number of false alarms, and the median seconds of a sync with a proof and of one without."""
    from tests.distributed.proved_engine import ProvedEngine

    engine, alarms = ProvedEngine(worker, weights), 0
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * SYNCS // BATCH):
        prove = number % 4 in (0, 3)  # so that neither kind is always first
        for _ in range(BATCH):
            changed = {name: tensor + 1e-3 * torch.randn_like(tensor) for name, tensor in weights.items()}
            started_s = time.monotonic()
            alarms += bool(engine.sync(changed, prove=prove))
            times[prove].append(time.monotonic() - started_s)
    return alarms, median(times[True]), median(times[False])


def speed_of_digests(device: torch.device, report: Callable[[str], None]) -> Row:
    """Compares the bandwidth of digests with that of a copy, which reads and writes.

    Args:
        device: The device of the tensors.
        report: Takes a line with the figures.
    """
    whole = torch.empty(TENSORS, ELEMENTS[device.type], device=device, dtype=torch.bfloat16).normal_()
    other = torch.empty_like(whole)
    tensors = list(whole)

    def seconds(work: Callable[[], object]) -> float:
        found = []
        for _ in range(ROUNDS + 1):
            started_s = time.monotonic()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found.append(time.monotonic() - started_s)
        return median(found[1:])

    digest_s, copy_s = seconds(lambda: digests_of(tensors)), seconds(lambda: other.copy_(whole))
    ours, peer = whole.nbytes / digest_s / 1e9, 2 * whole.nbytes / copy_s / 1e9
    report(f"digests on {device.type}: {ours:.2f} GB/s, and a copy reads and writes {peer:.2f} GB/s")
    facts: dict[str, Any] = {"machine": machine_in_words(), "versions": installed_versions()}
    name = f"digests on {device.type}, against memory"
    return Row(name=name, unit="GB/s", ours=ours, peer=peer, goal=at_least(SLOWEST), runs=ROUNDS, **facts)
