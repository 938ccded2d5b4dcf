"""The GPUs of this machine, and a row of a figure that was measured on them."""

from __future__ import annotations

import subprocess
from functools import cache

from benchmarks.table import Goal, Row, machine_in_words
from rl_safe_workers.versions import installed_versions


def count_gpus() -> int:
    """GPUs of this machine, without a CUDA context in this process."""
    import torch

    return torch.cuda.device_count()


def gpu_memory_mib() -> int:
    """Memory in use on all GPUs together, in MiB."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split()))


def gpu_row(name: str, unit: str, ours: float, goal: Goal, peer: float | None = None) -> Row:
    """A figure of one run on this machine's GPUs."""
    return Row(
        name=name, unit=unit, ours=ours, peer=peer, goal=goal, runs=1, machine=machine(), versions=installed_versions()
    )


@cache
def machine() -> str:
    """Describes this machine with its GPUs."""
    import torch

    if not (count := torch.cuda.device_count()):
        return machine_in_words()
    return f"{count} x {torch.cuda.get_device_properties(0).name}, {machine_in_words()}"
