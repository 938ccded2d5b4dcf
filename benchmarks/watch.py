"""Measures how much the watch of ranks costs a plain Megatron script, by blocks of steps with and without it, in turns.

Both jobs share the GPUs, or the cores of a machine without GPUs. One job waits while the other runs its block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.comms import MIB, NOTHING
from benchmarks.gpus import count_gpus, machine
from benchmarks.script import GPUS, HIDDEN, LAYOUTS, TOKENS, WATCHED, block_ratios, run_in_turns
from benchmarks.table import Row, at_least, at_most
from rl_safe_workers.versions import installed_versions

BLOCKS, BLOCK_STEPS = 20, 3
DEAREST_PERCENT, LARGEST_MIB, SLOWEST = 0.5, 20.0, 1.03


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs 20 blocks of each job. Takes about two minutes.

    Args:
        report: Takes a line with the raw figures.

    Raises:
        RunError: If a rank fails.
    """
    on_gpus = count_gpus() >= GPUS
    size = (HIDDEN, TOKENS) if on_gpus else (64, 64)
    plain, watched = run_in_turns(
        LAYOUTS[0],
        (NOTHING, WATCHED),
        device="cuda" if on_gpus else "cpu",
        hidden=size[0],
        tokens=size[1],
        blocks=BLOCKS,
        block_steps=BLOCK_STEPS,
    )
    report(f"plain {[rank['block_s'] for rank in plain]}")
    report(f"watched {[rank['block_s'] for rank in watched]}")
    ratios = block_ratios(watched, plain)
    share, held = (max(rank[key] for rank in watched) for key in ("watch_share", "watch_bytes"))
    facts: dict[str, Any] = {"machine": machine(), "versions": installed_versions(), "runs": BLOCKS}
    return [
        Row(name="the watch's threads, of a core", unit="%", ours=100 * share, goal=at_most(DEAREST_PERCENT), **facts),
        Row(name="the watch's memory", unit="MiB", ours=held / MIB, goal=at_most(LARGEST_MIB), **facts),
        Row(name="blocks of steps, watched over plain, median", unit="", ours=ratios["step_ratio"],
            goal=at_most(SLOWEST), **facts),
        Row(name="lower end of its 95 % interval", unit="", ours=ratios["step_ratio_low"], goal=at_least(0), **facts),
        Row(name="upper end of its 95 % interval", unit="", ours=ratios["step_ratio_high"], goal=at_least(0), **facts),
    ]  # fmt: skip
