"""Compares communicators that NCCL suspends for a rollout with communicators that are dropped and made again.

Needs two GPUs, and NCCL 2.29.7 or later. If torch brings an older NCCL, set ``LD_PRELOAD=.../libnccl.so.2``. Four ranks
share the two GPUs as two hosts. Every figure is from the rank that takes most.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.comms import (
    DROPS,
    LARGE,
    LARGE_BATCH,
    LAYOUTS,
    OURS,
    RELEASES,
    SMALL_LAYOUTS,
    TOKENS,
    release_rows,
    run_layouts,
)
from benchmarks.gpu import make_model
from benchmarks.gpus import count_gpus, gpu_row
from benchmarks.table import Row, at_most
from rl_safe_workers.comms.nccl_suspend import why_not
from rl_safe_workers.errors import ResourceError

GPUS, ROWS = 2, 8
RUN = (*SMALL_LAYOUTS[:2], LAYOUTS[0])
"""Layouts without pipelines. Pipelines here send unbatched, and only torch 2.12 can suspend such communicators."""


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs each layout with suspended, with dropped, and with kept communicators. Takes about five minutes.

    Raises:
        ResourceError: If there are fewer than two GPUs, or NCCL cannot suspend.
        RunError: If a rank fails.
    """
    if (gpus := count_gpus()) < GPUS:
        raise ResourceError(f"bench suspend: needs {GPUS} GPUs; there are {gpus}")
    if reason := why_not():
        raise ResourceError(f"bench suspend: this NCCL cannot suspend a communicator: {reason}")
    chosen = os.environ.get("RL_SAFE_BENCH_LAYOUTS", ";".join(layout.name for layout in RUN)).split(";")
    layouts = [layout for layout in RUN if layout.name in chosen]
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as folder:
        model = Path(folder) / "model"
        make_model(model, LARGE)
        overrides = [f"model.path={model}", *LARGE_BATCH]
        ways = (OURS, RELEASES, DROPS)
        found = run_layouts(Path(folder), layouts, overrides, rows=ROWS, tokens=TOKENS, report=report, warmups=ways)
    made = []
    for layout in layouts:
        suspended, dropped = found[layout.name][RELEASES], found[layout.name][DROPS]
        made += [
            *release_rows(f"{layout.name}, suspended", suspended),
            *release_rows(f"{layout.name}, dropped", dropped),
            gpu_row(
                f"{layout.name}: suspended, against dropped", "s", suspended["cycle_s"], at_most(1), dropped["cycle_s"]
            ),
        ]
    return made
