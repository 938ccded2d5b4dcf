"""Shims for megatron-core's fully-parallel load, which verl's own checkpoint manager uses, where there is no GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor


def apply() -> None:
    """Has it make its buffers on the CPU (dist_checkpointing/exchange_utils.py:98 and 110)."""
    init_data, empty_like = ShardedTensor.init_data, torch.empty_like

    @functools.wraps(init_data)
    def on_cpu(self: ShardedTensor, device: Any, *_: Any) -> None:
        init_data(self, "cpu", torch.empty)

    @functools.wraps(empty_like)
    def like(*args: Any, **kwargs: Any) -> torch.Tensor:
        return empty_like(
            *args, **{**kwargs, "device": "cpu" if kwargs.get("device") == "cuda" else kwargs.get("device")}
        )

    ShardedTensor.init_data, torch.empty_like = on_cpu, like
