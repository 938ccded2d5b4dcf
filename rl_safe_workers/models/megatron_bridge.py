"""Adapts Megatron-Bridge to the interface of `bridge.WeightBridge`, with only the needed part of its AutoBridge.

Written against AutoBridge in models/conversion/auto_bridge.py. The library's layers need Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state


def parallel_settings() -> dict[str, Any]:
    """Returns the parallel sizes of the live Megatron groups, by the names of TransformerConfig's fields."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "sequence_parallel": tensor > 1,
    }


class MegatronBridge:
    """An AutoBridge together with its model provider.

    Attributes:
        config: The provider, which is also Megatron's TransformerConfig.
    """

    def __init__(self, auto_bridge: Any, provider: Any) -> None:
        """Wraps the two. ``provider`` must be finalized."""
        self._auto_bridge, self.config = auto_bridge, provider

    def _model_provider(self, post_model_creation_callbacks: list[Any]) -> Any:
        """Returns the provider's ``provide(pre_process, post_process, vp_stage=None)``."""
        return self.config.provide

    def load_weights(self, models: Sequence[torch.nn.Module], weights_path: str) -> None:
        """Reads HF weights into model chunks. Collective over: the groups that split each weight."""
        self._auto_bridge.load_hf_weights(list(models), hf_path=weights_path)

    @torch.no_grad()
    def export_weights(self, models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every HF weight, unsharded, on every rank. Collective over: the training world, at each item."""
        yield from self._auto_bridge.export_hf_weights(list(models), cpu=False, show_progress=False)

    def own_weights(self, models: Sequence[torch.nn.Module]) -> None:
        """Returns None, because the library always gathers every weight on every rank."""


def open_megatron_bridge(hf_path: str, *, dtype: torch.dtype, settings: dict[str, Any]) -> MegatronBridge | None:
    """Opens an HF directory with Megatron-Bridge; returns None if it has no mapping for the model.

    Args:
        hf_path: Local HF directory. Remote code is never run.
        dtype: Parameter dtype of the Megatron model.
        settings: Fields of Megatron's TransformerConfig that override the provider's own.
    """
    from megatron.bridge import AutoBridge

    if not AutoBridge.can_handle(hf_path, trust_remote_code=False):
        return None
    auto_bridge = AutoBridge.from_hf_pretrained(hf_path, trust_remote_code=False)
    provider = auto_bridge.to_megatron_provider(load_weights=False)
    types = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype is torch.bfloat16, "fp16": False}
    for name, value in {**types, **parallel_settings(), **settings}.items():
        setattr(provider, name, value)
    provider.finalize()
    return MegatronBridge(auto_bridge, provider)
