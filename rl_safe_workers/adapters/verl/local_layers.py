"""Megatron's own layers for verl's Megatron engine where Transformer Engine is not installed, on CPU or GPU.

verl asks mbridge for a model, and mbridge asks Megatron for Transformer Engine's layers (mbridge 0.15.1). Without it
stock verl ends there; this lets a small model run. Line numbers are verl 0.9.1's.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch


class _LocalBridge:
    """Stands for mbridge's ``AutoBridge``: layers without Transformer Engine (transformer_impl.py:329)."""

    @staticmethod
    def from_config(hf_config: Any, dtype: torch.dtype = torch.bfloat16, **_: Any) -> Any:
        """Makes the bridge of our own CPU runs."""
        from rl_safe_workers.models.mbridge_bridge import open_mbridge

        bridge: Any = open_mbridge(hf_config, dtype=dtype, settings={}, transformer_engine=False)
        load = bridge.load_weights

        def load_weights(models: Sequence[torch.nn.Module], weights_path: str, **_: Any) -> None:
            load(models, weights_path)
            # Where mbridge remembers how the files were cut, for save_weights.
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
    """Drops verl's mask of padding ``[batch, sequence]``, which Megatron's local attention takes for one of scores.

    Padding follows the tokens, so that the causal mask alone keeps it from them.
    """
    return args, {**kwargs, "attention_mask": None}


def apply() -> None:
    """Puts our bridge in the place of mbridge's in this process, unless Transformer Engine is there. Idempotent."""
    if find_spec("transformer_engine") is None:
        from verl.models.mcore import mbridge

        mbridge.AutoBridge = _LocalBridge
