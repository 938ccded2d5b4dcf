"""Times weight syncs into vLLM on two GPUs, with and without proof: of 18,867 tensors, and of a 5 B model.

A sync between two GPUs is compared with a broadcast of as many bytes. A sync within each of two GPUs, which trainers
and engines share, is compared with a copy of as many bytes. The first update of an engine goes through vLLM's own
loaders, and later updates are copied directly (`rl_safe_workers.rollout.direct_load`). The difference is the cost of
the loaders.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.gpu import BROADCAST_BYTES, LARGE, RECIPE, make_model, run_ranks
from benchmarks.gpus import count_gpus, gpu_row
from benchmarks.quickstart import run_recipe
from benchmarks.sync_proof import speed_of_digests
from benchmarks.table import Row, at_least, at_most
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.driver.outputs.metrics import PROOF_SECONDS, phase_seconds_name
from rl_safe_workers.errors import ResourceError
from rl_safe_workers.lifecycle import Phase

MANY = SeededModelConfig(num_hidden_layers=48, num_experts=128, num_experts_per_tok=4)
"""A model of 48 layers with 128 experts: 18,867 small tensors."""
MODELS: Mapping[str, SeededModelConfig] = {
    "5 B": LARGE.model_copy(update={"num_hidden_layers": 16}),
    "48 x 128 experts": MANY,
}
GPUS, STEPS, ROUNDS = 2, 6, 5
SYNC = phase_seconds_name(Phase.SYNC)


def measure(report: Callable[[str], None]) -> list[Row]:
    """Syncs both models between two GPUs and within them, and times digests. Takes about twelve minutes.

    Raises:
        ResourceError: If there are fewer than two GPUs.
        RunError: If a job fails.
    """
    if count_gpus() < GPUS:
        raise ResourceError(f"bench weight_sync: needs {GPUS} GPUs")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as name:
        for model, spec in MODELS.items():
            path = Path(name) / model.replace(" ", "_")
            make_model(path, spec)
            common = [f"model.path={path}", "model.create=null"]
            size_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            rows += _between(model, common, report) + _within(model, common, size_bytes, report)
    return [*rows, speed_of_digests(torch.device("cuda", 0), report)]


def _between(model: str, common: Sequence[str], report: Callable[[str], None]) -> list[Row]:
    """Measures syncs between one trainer and one engine, each on its own GPU."""
    found = run_ranks("syncs", [*common, "cluster.num_trainers=1"], rollouts=1)
    size_bytes = found["weight_bytes"]
    peer = run_ranks(
        "broadcasts",
        [*common, "cluster.num_trainers=2", "megatron.expert_model_parallel_size=2"],
        variables={BROADCAST_BYTES: str(size_bytes)},
    )["broadcast"]
    report(f"{model}, 1 to 1: {size_bytes / 2**20:.0f} MiB, {json.dumps(found)}, broadcast {peer:.4f} s")
    rates = [size_bytes / 2**30 / seconds for seconds in (found["sync"], peer)]
    return [
        gpu_row(f"{model}, 1 to 1: sync, against a broadcast", "GiB/s", rates[0], at_least(0.9), rates[1]),
        gpu_row(f"{model}, 1 to 1: a later sync, against the first", "s", found["sync"], at_most(0.2),
                found["first_sync"]),
        gpu_row(f"{model}, 1 to 1: launches of the copies into buckets", "s", found["pack_launches"], at_most(9e9)),
        gpu_row(f"{model}, 1 to 1: a proved sync, against another", "s", found["proved_sync"], at_most(1.25),
                found["sync"]),
    ]  # fmt: skip


def _within(model: str, common: Sequence[str], size_bytes: int, report: Callable[[str], None]) -> list[Row]:
    """Measures syncs of two trainers at EP2 and two engines on the same GPUs: alone, and as phases of a run."""
    shared = [
        *common,
        "cluster.colocated=true",
        "cluster.num_trainers=2",
        "cluster.num_rollouts=2",
        "megatron.expert_model_parallel_size=2",
    ]
    found = run_ranks("syncs", shared, rollouts=2)
    report(f"{model}, colocated: {size_bytes / 2**20:.0f} MiB, {json.dumps(found)}")
    copy_s = _copy_seconds(size_bytes)
    rates = [size_bytes / 2**30 / seconds for seconds in (found["sync"], copy_s)]
    return [
        gpu_row(f"{model}, colocated: sync, against a copy", "GiB/s", rates[0], at_least(0.6), rates[1]),
        gpu_row(f"{model}, colocated: a proved sync, against another", "s", found["proved_sync"], at_most(1.25),
                found["sync"]),
        *_phases(model, shared, report),
    ]  # fmt: skip


def _phases(model: str, overrides: Sequence[str], report: Callable[[str], None]) -> list[Row]:
    """Measures phases ``sync`` of a run. Every other sync is proved."""
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as folder:
        records = run_recipe(
            f"bench weight_sync: {model}",
            Path(folder),
            *overrides,
            f"trainer.total_training_steps={STEPS}",
            "trainer.save_freq=-1",
            "rollout.prove_sync_freq=2",
            # With random weights in 48 layers, the router's scores of experts are nearly tied.
            "rollout.max_logprob_gap=100",
            recipe=RECIPE,
        )
    report(f"{model}, colocated: {json.dumps([{key: r.get(key) for key in (SYNC, PROOF_SECONDS)} for r in records])}")
    later = records[1:]
    proved, plain = ([r for r in later if bool(r.get(PROOF_SECONDS)) is is_proved] for is_proved in (True, False))
    proof_s = median(record[PROOF_SECONDS] for record in proved)
    proved_s, plain_s = (median(record[SYNC] for record in some) for some in (proved, plain))
    return [
        gpu_row(f"{model}, colocated: proof, against the phase", "s", proof_s, at_most(0.05), proved_s),
        gpu_row(f"{model}, colocated: a phase with a proof, against another", "s", proved_s, at_most(1.25), plain_s),
    ]


def _copy_seconds(size_bytes: int) -> float:
    """Returns the seconds of a copy within a GPU."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found: list[float] = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started_s)
    del source, target
    torch.cuda.empty_cache()
    return median(found[1:])
