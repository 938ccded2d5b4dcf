"""Builds layer specs without Transformer Engine, and maps their parameter names to those that weight bridges expect."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig


class SequenceParallelRMSNorm:
    """An ``nn.RMSNorm`` that works with sequence parallelism.

    Megatron's plain torch norm refuses sequence parallelism (transformer/torch_norm.py:32). The only thing that it
    lacks is the attribute that makes ``finalize_model_grads`` sum the weight's gradient over the TP ranks. This is a
    class and not a function, because megatron's ``build_module`` calls only classes.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.RMSNorm:
        """Builds the norm. Its weight has shape ``[hidden_size]`` and dtype ``params_dtype``."""
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def _replace_norms(spec: Any) -> Any:
    """Returns a copy of a layer spec in which every plain torch norm is replaced by `SequenceParallelRMSNorm`."""
    if spec is WrappedTorchNorm:
        return SequenceParallelRMSNorm
    if isinstance(spec, list):
        return [_replace_norms(item) for item in spec]
    if isinstance(spec, ModuleSpec) or (dataclasses.is_dataclass(spec) and not isinstance(spec, type)):
        changes = {
            f.name: _replace_norms(getattr(spec, f.name)) for f in dataclasses.fields(spec) if f.name != "params"
        }
        return dataclasses.replace(spec, **changes)
    return spec


def decoder_block_spec(config: TransformerConfig, *, vp_stage: int | None = None) -> Any:
    """Returns Megatron's local block spec for this pipeline stage, with norms that allow sequence parallelism."""
    if not hasattr(moe_utils, "te_general_gemm"):
        # moe_utils.py:1192 reads this name, which stays undefined if the import of Transformer Engine fails.
        moe_utils.te_general_gemm = None
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    return _replace_norms(spec)


_LOCAL_TO_FUSED = (
    (re.compile(r"\.input_layernorm\.weight$"), r".self_attention.linear_qkv.layer_norm_weight"),
    (re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$"), r".mlp.experts.\2.weight\1"),
)
_DENSE_LAYER_NORM = (re.compile(r"\.pre_mlp_layernorm\.weight$"), r".mlp.linear_fc1.layer_norm_weight")


class FusedNameView(torch.nn.Module):
    """A view of a model under the parameter names that Transformer Engine's fused layers would have.

    Weight bridges look up parameters by these names (mbridge 0.15.1, core/bridge.py:174, 214, 364, 515). The view
    shares every tensor with the model and adds none. Use a view for one load or export only.
    """

    def __init__(self, model: torch.nn.Module, *, is_moe: bool) -> None:
        super().__init__()
        # Kept out of the module registry, so that the view owns no parameters of its own.
        self.__dict__["_viewed"] = model
        self.__dict__["_renames"] = _LOCAL_TO_FUSED if is_moe else (*_LOCAL_TO_FUSED, _DENSE_LAYER_NORM)
        if hasattr(model, "decoder"):
            self.__dict__["decoder"] = model.decoder

    def _rename(self, name: str) -> str:
        for pattern, replacement in self.__dict__["_renames"]:
            name = pattern.sub(replacement, name)
        return name

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the model's state dict under the fused names. The tensors are the model's own."""
        if self.__dict__.get("_state") is None:
            # Cached, because mbridge calls this once for every weight that it loads (core/bridge.py:197).
            state = self.__dict__["_viewed"].state_dict()
            self.__dict__["_state"] = {self._rename(name): value for name, value in state.items()}
        return dict(self.__dict__["_state"])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yields the model's parameters under the fused names."""
        for name, parameter in self.__dict__["_viewed"].named_parameters(*args, **kwargs):
            yield self._rename(name), parameter
