"""The model alone in Megatron's sharded form, for conversions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from rl_safe_workers.checkpoint.state.adapted_layers import load_layers
from rl_safe_workers.checkpoint.state.state import CONTENT_METADATA, chunk_keys


def _unwrapped(chunk: Any) -> Any:
    # Use the wrapped module: the sharded state of DistributedDataParallel has a prefix that its load does not expect.
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def model_state(chunks: Sequence[Any], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """Builds the sharded state dict of the model chunks, with global keys, for saving or loading. Not collective.

    Args:
        chunks: Model chunks, wrapped in DistributedDataParallel or not.
        metadata: The format; None for `CONTENT_METADATA`.
    """
    return {
        # Pass a copy: Megatron writes its current data-parallel group into the dict (transformer/utils.py:205).
        key: _unwrapped(chunk).sharded_state_dict(metadata=dict(metadata or CONTENT_METADATA))
        for key, chunk in zip(chunk_keys(chunks), chunks, strict=True)
    }


@torch.no_grad()
def restore_model(chunks: Sequence[Any], optimizer: Any, state: dict[str, Any]) -> None:
    """Loads a state dict into the model, and updates the optimizer's copies of the parameters. Not collective."""
    for key, chunk in zip(chunk_keys(chunks), chunks, strict=True):
        load_layers(_unwrapped(chunk), state[key])
    if optimizer is not None:
        optimizer.reload_model_params()
