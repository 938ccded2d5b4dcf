"""Runs a function on several gloo ranks that have verl imported, and its engines and ours registered."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from rl_safe_workers.ports import port_to_listen_on
from tests.distributed import ranks as plain
from tests.distributed.ranks import Outcome, values
from tests.verl import stock_on_cpu

__all__ = ["Outcome", "run_verl_ranks", "values"]


def _rank(rank: int, function: Callable[..., Any], size: int, port: int, stock: bool, args: tuple[Any, ...]) -> Any:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    # Else megatron-core's own saves leave a helper process behind, which outlives the rank.
    filesystem_async._results_queue = queue.Queue()
    if stock:
        stock_on_cpu.apply()
        os.environ.update(VERL_ENGINE_VENDOR="nvidia", VERL_ENGINE_DEVICE="cuda")
    return function(rank, *args)


def run_verl_ranks(
    function: Callable[..., Any], size: int, *args: Any, stock: bool = False, timeout_s: float = 120.0
) -> list[Outcome]:
    """Calls ``function(rank, *args)`` on ``size`` ranks, with our engines chosen, or verl's own."""
    plain.PRELOAD[:] = ["tests.verl.preload"]
    return plain.run_ranks(
        _rank, size, function, size, port_to_listen_on("127.0.0.1"), stock, args, timeout_s=timeout_s
    )
