"""Measures the share of bf16 weights that a GRPO step changes, and the bytes that a sync of only changes would save.

It is only a measurement: this package always syncs whole weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from benchmarks.quickstart import require_recipe, run_recipe
from benchmarks.table import Row, at_least, at_most, machine_in_words
from rl_safe_workers.versions import installed_versions

STEPS, LEARNING_RATE = 10, 1e-6
WORTH_IT = 3.0
"""Factor of saved bytes from which on such a sync would be worth building."""
_VALUE_BYTES, _INDEX_BYTES = 2, 4


def measure(report: Callable[[str], None]) -> list[Row]:
    """Trains with a checkpoint after each step, and compares the weights of consecutive checkpoints.

    Args:
        report: Takes a line of progress for each step.

    Raises:
        ConfigError: If this is no checkout with recipes.
        RunError: If the run fails.
    """
    require_recipe("sync_delta")
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as folder:
        run_recipe(
            "bench sync_delta: the run",
            Path(folder),
            f"trainer.total_training_steps={STEPS + 1}",
            f"actor.optim.lr={LEARNING_RATE}",
            "trainer.save_freq=1",
            "rl_safe.checkpoint.keep_last=0",
            "trainer.default_local_dir=saves",
        )
        shares, factors = [], []
        before = _weights(Path(folder) / "saves" / "global_step_1")
        for step in range(2, STEPS + 2):
            after = _weights(Path(folder) / "saves" / f"global_step_{step}")
            changed, elements, delta_bytes = _compare(before, after)
            shares.append(changed / elements)
            factors.append(elements * _VALUE_BYTES / delta_bytes)
            report(f"step {step}: {changed} of {elements} elements change, {factors[-1]:.1f} times fewer bytes")
            before = after
    facts: dict[str, Any] = {"machine": machine_in_words(), "versions": installed_versions(), "runs": STEPS}
    return [
        Row(name=f"elements that a step of lr {LEARNING_RATE:g} changes in bf16", unit="%", ours=100 * median(shares),
            goal=at_most(100 / WORTH_IT), **facts),
        Row(name="bytes of all weights, over those of a delta", unit="", ours=median(factors), goal=at_least(WORTH_IT),
            **facts),
    ]  # fmt: skip


def _weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Reads the parameters of a checkpoint, in bf16."""
    shards = checkpoint / "dist_ckpt"
    stored = FileSystemReader(shards).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(about.size)
        for name, about in stored.items()
        if isinstance(about, TensorStorageMetadata) and not name.startswith("optimizer.")
    }
    dcp.load(found, checkpoint_id=shards, no_dist=True)
    return {name: tensor.bfloat16() for name, tensor in found.items()}


def _compare(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> tuple[int, int, int]:
    """Returns the number of changed elements, the number of all elements, and the bytes of the changes.

    The changes of a tensor are the new values, plus either a bit for each element or an index for each change.
    """
    changed_in_all = elements = delta_bytes = 0
    for name, tensor in after.items():
        changed = int((tensor.view(torch.int16) != before[name].view(torch.int16)).sum())
        delta_bytes += changed * _VALUE_BYTES + min(-(-tensor.numel() // 8), changed * _INDEX_BYTES)
        changed_in_all, elements = changed_in_all + changed, elements + tensor.numel()
    return changed_in_all, elements, delta_bytes
