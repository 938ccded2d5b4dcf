"""Builds layer specs without Transformer Engine, and maps their parameter names to those that weight bridges expect."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

LOCAL_LAYER_SETTINGS: dict[str, Any] = {
    "persist_layer_norm": False,  # transformer/torch_norm.py:30 refuses it
    "moe_grouped_gemm": False,  # needs the grouped_gemm package or Transformer Engine
    "masked_softmax_fusion": False,  # needs Megatron's compiled kernels
    "bias_activation_fusion": False,  # compiled by torch.compile at its first call
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "moe_permute_fusion": False,
}
"""Settings that bridges turn on and Megatron's local layers do not support."""


class SequenceParallelRMSNorm:
    """An ``nn.RMSNorm`` that works with sequence parallelism.

    Megatron's plain torch norm refuses sequence parallelism (transformer/torch_norm.py:32). The norm lacks only the
    attribute that makes ``finalize_model_grads`` sum the weight's gradient over the TP ranks. This is a class and not a
    function, because megatron's ``build_module`` calls only classes.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.RMSNorm:
        """Builds the norm. Its weight has shape ``[hidden_size]`` and dtype ``params_dtype``."""
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class LatentDotProductAttention(DotProductAttention):
    """Megatron's plain attention for latent attention, whose keys are wider than its values.

    Latent attention passes both widths (transformer/multi_latent_attention.py:155). Megatron's plain attention refuses
    them (transformer/dot_product_attention.py:46). Its computation is right for any widths. It uses its own
    ``kv_channels`` only for the shape of the result (transformer/dot_product_attention.py:249).
    """

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        """Builds the attention.

        Args:
            *args: As for megatron's plain attention.
            k_channels: Width of a head's query and key. It is unused, because the softmax scale is given with it.
            v_channels: Width of a head's value; None for ``kv_channels``. Only Attention leaves it out, for an
                instance that latent attention then replaces (transformer/attention.py:318).
            **kwargs: As for megatron's plain attention.
        """
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention with the norms and projections that the spec names.

    megatron-core 0.19 requires a norm fused into the query's projection if the projection has no low rank
    (transformer/mla_qk_norm_config.py:254). Only Transformer Engine has such a layer. DeepSeek-V3 has no such norm.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) or IdentityOp for name in names}


class BiasedRowParallelLinear(RowParallelLinear):
    """Megatron's row-parallel layer, for models whose experts have biases.

    Megatron adds an expert's bias in place (transformer/mlp.py:354). Autograd refuses this for the output of Megatron's
    own layer. With sequence parallelism, Megatron also sums the gradients of these biases over the tensor-parallel
    ranks (tensor_parallel/layers.py:1410), but those ranks have other experts.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Builds the layer as Megatron does."""
        super().__init__(*args, **kwargs)
        if self.is_expert:
            self.bias.sequence_parallel = False

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns a copy of the output, and the bias."""
        output, bias = super().forward(input_)
        return output.clone(), bias


def _replace(spec: Any, replacements: Mapping[type, type]) -> Any:
    """Returns a copy of a layer spec with some modules replaced."""
    if isinstance(spec, type):
        return replacements.get(spec, spec)
    if isinstance(spec, partial):  # megatron-core 0.19 wraps some modules like this
        return partial(
            spec.func, *spec.args, **{key: _replace(value, replacements) for key, value in spec.keywords.items()}
        )
    if isinstance(spec, list):
        return [_replace(item, replacements) for item in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        changes = {
            f.name: _replace(getattr(spec, f.name), replacements)
            for f in dataclasses.fields(spec)
            if f.name != "params"
        }
        return dataclasses.replace(spec, **changes)
    return spec


def decoder_block_spec(
    config: TransformerConfig, *, vp_stage: int | None = None, self_attention: type = SelfAttention
) -> Any:
    """Returns Megatron's local block spec for this pipeline stage, with norms that allow sequence parallelism.

    Args:
        config: The model's configuration.
        vp_stage: The virtual pipeline stage, or None.
        self_attention: The class of self-attention, for a model that has its own.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        # moe_utils.py:1192 reads this name, which stays undefined if the import of Transformer Engine fails.
        moe_utils.te_general_gemm = None
    # multi_latent_attention.py:62 believes that Transformer Engine is installed: it can import the names, as None.
    multi_latent_attention.HAVE_TE = find_spec("transformer_engine") is not None
    # multi_latent_attention.py:69 of megatron-core 0.19 imports this layer only together with Transformer Engine's.
    multi_latent_attention.Linear = Linear
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    replacements: dict[type, type] = {WrappedTorchNorm: SequenceParallelRMSNorm, SelfAttention: self_attention}
    if config.num_moe_experts and config.add_bias_linear:
        replacements[RowParallelLinear] = BiasedRowParallelLinear
    if not config.multi_latent_attention:
        return _replace(spec, replacements)
    replacements |= {DotProductAttention: LatentDotProductAttention, MLASelfAttention: LatentAttention}
    spec = _replace(spec, replacements)
    for layer in spec.layer_specs:
        # These projections are whole on every tensor-parallel rank, as with Transformer Engine. Megatron's own spec
        # splits them. Then no rank has the whole gradient of the keys' rotary part. Each rank has that of its own
        # heads, and the gather does not sum them (transformer/multi_latent_attention.py:607).
        attention = layer.submodules.self_attention
        attention.submodules.linear_q_down_proj = attention.submodules.linear_kv_down_proj = Linear
    return spec


_Renames = tuple[tuple[re.Pattern[str], str], ...]
_EXPERTS: _Renames = (
    (re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$"), r".mlp.experts.\2.weight\1"),
)
_DENSE_LAYER: _Renames = ((re.compile(r"\.pre_mlp_layernorm\.weight$"), r".mlp.linear_fc1.layer_norm_weight"),)
_ATTENTION: _Renames = ((re.compile(r"\.input_layernorm\.weight$"), r".self_attention.linear_qkv.layer_norm_weight"),)
_LATENT_ATTENTION: _Renames = (
    (
        re.compile(r"\.self_attention\.(q|kv)_layernorm\.weight$"),
        r".self_attention.linear_\1_up_proj.layer_norm_weight",
    ),
)


class FusedNameView(torch.nn.Module):
    """A view of a model under the parameter names that Transformer Engine's fused layers would have.

    Weight bridges look up parameters by these names (mbridge 0.15.1, core/bridge.py:174, 214, 364, 515). The view
    shares every tensor with the model and adds none. Use a view for one load or export only.
    """

    def __init__(self, model: torch.nn.Module, config: TransformerConfig) -> None:
        super().__init__()
        attention = _LATENT_ATTENTION if config.multi_latent_attention else _ATTENTION
        # Kept out of the module registry, so that the view owns no parameters of its own.
        self.__dict__["_viewed"] = model
        # A model with experts may have dense layers, too. Bridges know the norm of those by its local name as well.
        self.__dict__["_renames"] = (*attention, *(_EXPERTS if config.num_moe_experts else _DENSE_LAYER))
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
