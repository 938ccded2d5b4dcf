"""Describes the GPUs of this machine, and makes rows for figures that were measured on them."""

from __future__ import annotations

import subprocess
from functools import cache

from benchmarks.table import Goal, Row, machine_in_words
from rl_safe_workers.versions import installed_versions


def count_gpus() -> int:
    """Returns the number of GPUs of this machine, without creating a CUDA context in this process."""
    import torch

    return torch.cuda.device_count()


def gpu_bytes() -> int:
    """Returns the bytes of memory of the first GPU; 0 without a GPU."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.device_count() else 0


def gpu_memory_mib() -> int:
    """Returns the memory in use on all GPUs together, in MiB."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.split()))


def gpu_row(name: str, unit: str, ours: float, goal: Goal, peer: float | None = None) -> Row:
    """Returns a row for a figure of one run on this machine's GPUs."""
    return Row(
        name=name, unit=unit, ours=ours, peer=peer, goal=goal, runs=1, machine=machine(), versions=installed_versions()
    )


@cache
def machine() -> str:
    """Returns a description of this machine with its GPUs."""
    import torch

    if not (count := torch.cuda.device_count()):
        return machine_in_words()
    return f"{count} x {torch.cuda.get_device_properties(0).name}, {machine_in_words()}"
