"""Measures how a limit of CTAs changes the bandwidth and memory of each kind of collective. The budget relies on it.

Needs four GPUs, or two for groups of two only. The ranks form groups of two, then of four. The figures are from rank 0.
With ``RL_SAFE_BENCH_HOSTS=apart``, NCCL believes that each of two ranks is on its own host, connected by sockets. Both
ranks may then share a GPU, so one GPU is enough.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.comms import run_processes
from benchmarks.gpu import HOSTS
from benchmarks.gpus import count_gpus, gpu_row
from benchmarks.table import Row, at_least, at_most
from rl_safe_workers.errors import ResourceError
from rl_safe_workers.topology.budget import LIMITS as BUDGET
from rl_safe_workers.topology.groups import OpClass, Traffic
from rl_safe_workers.topology.memory import KERNEL_BYTES, Links, costs
from rl_safe_workers.worlds.store import serve_store

SIZES = (2, 4) if HOSTS == "one" else (2,)
LIMITS = (None, 20, 16, 12, 9, 8, 4, 1) if HOSTS == "one" else (None, 8, 4, 2, 1)
MESSAGES_MIB = (8, 32, 256) if HOSTS == "one" else (2, 8, 32)
"""Sizes of messages. Sockets carry about 2 GiB/s, a hundredth of NVLink. Four ranks on one GPU take ten times as long
as two."""
CLASSES = (OpClass.REDUCE, OpClass.GATHER_SCATTER, OpClass.ALL_TO_ALL, OpClass.BATCHED_P2P, OpClass.UNBATCHED_P2P)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "batched_p2p", "unbatched_p2p")
"""Collectives of `CLASSES`, in the order in which a group connects them."""
SCALAR = "all_reduce of a scalar"
JOB_S = 300.0
MODULE = "benchmarks.comms_limits_ranks"


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs every limit on groups of two and of four. Takes a minute and a half.

    Raises:
        ResourceError: If there are fewer than two GPUs. Ranks on hosts of their own need only one.
        RunError: If a rank fails.
    """
    gpus = count_gpus()
    most = max(SIZES) if HOSTS == "apart" and gpus else gpus  # with "apart", ranks may share a GPU
    if most < min(SIZES):
        raise ResourceError(f"bench comms_limits: needs 4 GPUs, or 2 for groups of two only; there are {gpus}")
    ranks = max(size for size in SIZES if size <= most)
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as folder:
        _, address, _ = serve_store("127.0.0.1", timeout=timedelta(minutes=5))
        arguments = [str(ranks), str(address.port), folder]
        run_processes(MODULE, arguments, Path(folder), ranks=ranks, what="bench comms_limits", timeout_s=JOB_S)
        records: list[dict[str, Any]] = json.loads((Path(folder) / "0.json").read_text(encoding="utf-8"))
    for record in records:
        report(json.dumps(record))
    return rows(records)


def rows(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Returns the table: the bandwidth against NCCL's own channels, worst of two large messages, and the memory."""
    kernels, *groups = records
    free = {record["size"]: record["seconds"] for record in groups if record["max_ctas"] is None}
    made = []
    for record in groups:
        size, limit, seconds = record["size"], record["max_ctas"], record["seconds"]
        if limit is None:
            continue
        for name in COLLECTIVES:
            mib, worst = min(
                ((mib, free[size][_message(name, mib)] / seconds[_message(name, mib)]) for mib in MESSAGES_MIB[1:]),
                key=lambda found: found[1],
            )
            gib = mib / 1024 / seconds[_message(name, mib)]
            stages = size == 2 and name == COLLECTIVES[-1] and limit == BUDGET[Traffic.STAGES] and HOSTS == "one"
            made.append(
                gpu_row(
                    f"{size} ranks, {limit} CTAs: {name} of {mib} MiB",
                    "GiB/s",
                    gib,
                    at_least(0.75 if stages else 0),
                    gib / worst,
                )
            )
        made.append(
            gpu_row(
                f"{size} ranks, {limit} CTAs: {SCALAR}",
                "us",
                seconds[SCALAR] * 1e6,
                at_most(1.1 if limit == BUDGET[Traffic.CONTROL] else 10),
                free[size][SCALAR] * 1e6,
            )
        )
    worst_error = max(abs(_predicted(record) / sum(record["bytes"].values()) - 1) for record in groups)
    made.append(gpu_row("memory model, worst group: off by", "", worst_error, at_most(0.15)))
    off = abs(KERNEL_BYTES / kernels["bytes"]["kernels"] - 1)
    made.append(gpu_row("memory model, NCCL's kernels: off by", "", off, at_most(0.15)))
    return made


def _message(name: str, mib: int) -> str:
    return f"{name} {mib} MiB"


def _predicted(record: Mapping[str, Any]) -> int:
    neighbour = Links(pairs=1, exchanges=1)
    near = 1 if HOSTS == "apart" else None
    return sum(costs(CLASSES, size=record["size"], max_ctas=record["max_ctas"], links=neighbour, near=near))
