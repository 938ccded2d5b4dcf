"""Megatron-Bridge in verl's whole job, with Megatron's own layers. verl imports this module in every process."""

from __future__ import annotations

import sys
import typing
from typing import Any

import typing_extensions

from tests.bridge.placeholders import Placeholders


def _apply() -> None:
    typing.override = typing_extensions.override  # type: ignore[attr-defined] # Megatron-Bridge wants Python 3.12
    # verl imports Bridge's training for its configuration only.
    sys.meta_path.insert(0, Placeholders())
    from megatron.core.models.gpt.gpt_model import GPTModel

    from rl_safe_workers.models import megatron_bridge  # imports Bridge without Transformer Engine
    from rl_safe_workers.models.local_spec import LOCAL_LAYER_SETTINGS, decoder_block_spec

    bridge = megatron_bridge.AutoBridge
    provider_of, forward = bridge.to_megatron_provider, GPTModel.forward

    def to_megatron_provider(self: Any, *args: Any, **kwargs: Any) -> Any:
        provider = provider_of(self, *args, **kwargs)
        provider.transformer_layer_spec = decoder_block_spec
        for name, value in LOCAL_LAYER_SETTINGS.items():
            setattr(provider, name, value)
        provider.use_cpu_initialization = True
        return provider

    def without_padding_mask(self: Any, **kwargs: Any) -> Any:
        # Megatron's local attention would take verl's mask for a score mask. Padding follows the tokens.
        return forward(self, **{**kwargs, "attention_mask": None})

    bridge.to_megatron_provider, GPTModel.forward = to_megatron_provider, without_padding_mask


_apply()
