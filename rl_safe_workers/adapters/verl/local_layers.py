"""Gives verl's Megatron engine Megatron's own layers if Transformer Engine is not installed, on CPU or GPU.

verl asks mbridge for a model, and mbridge asks Megatron for Transformer Engine's layers (mbridge 0.15.1). Stock verl
fails there without Transformer Engine. This module lets a small model run. Line numbers are of verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch


class _LocalBridge:
    """Replaces mbridge's ``AutoBridge``. Its layers do not need Transformer Engine (transformer_impl.py:329)."""

    @staticmethod
    def from_config(hf_config: Any, dtype: torch.dtype = torch.bfloat16, **_: Any) -> Any:
        """Makes the bridge that our own CPU runs use."""
        from rl_safe_workers.models.mbridge_bridge import open_mbridge

        bridge: Any = open_mbridge(hf_config, dtype=dtype, settings={}, transformer_engine=False)
        load = bridge.load_weights

        def load_weights(models: Sequence[torch.nn.Module], weights_path: str, **_: Any) -> None:
            load(models, weights_path)
            # mbridge's save_weights needs this to know how the weights were split into files.
            bridge.safetensor_io = bridge._get_safetensor_io(weights_path)

        bridge.load_weights = load_weights
        provider_of = bridge._model_provider

        def model_provider(*args: Any, **kwargs: Any) -> Any:
            provide = provider_of(*args, **kwargs)

            def provided(*args: Any, **kwargs: Any) -> Any:
                model = provide(*args, **kwargs)
                model.register_forward_pre_hook(_without_padding_mask, with_kwargs=True)
                return model

            return provided

        bridge._model_provider = model_provider
        return bridge


def _without_padding_mask(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Drops verl's padding mask ``[batch, sequence]``, which Megatron's local attention would take for a score mask.

    Padding follows the tokens, so the causal mask alone keeps tokens from attending to it.
    """
    return args, {**kwargs, "attention_mask": None}


def apply() -> None:
    """Replaces mbridge's bridge by ours in this process, unless Transformer Engine is installed. Idempotent."""
    if find_spec("transformer_engine") is None:
        from verl.models.mcore import mbridge

        mbridge.AutoBridge = _LocalBridge
