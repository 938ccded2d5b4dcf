"""Adapts mbridge to work without Transformer Engine, with transformers 5, and over every layout.

The weight mapping is mbridge's. This module adds Megatron's local layers, the new place of RoPE settings in
transformers 5, a reader that opens each file once, and an export that gathers experts over any mix of TP, EP and
expert-TP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from mbridge.core import bridge as mbridge_core
from megatron.core.utils import unwrap_model
from transformers import PretrainedConfig

from rl_safe_workers.models.family_settings import family_settings
from rl_safe_workers.models.gathering import EXPERT_WEIGHT, export_shards
from rl_safe_workers.models.hf_reader import HfReader
from rl_safe_workers.models.local_spec import LOCAL_LAYER_SETTINGS, FusedNameView, decoder_block_spec
from rl_safe_workers.models.own_weights import OwnWeight, own_weights
from rl_safe_workers.topology.layout import check_rope

# mbridge's own function fails from megatron-core 0.20 on: it asks for instances of FullyShardedDataParallel, which has
# become a function (core/util.py:262; distributed/fsdp/mcore_fsdp_adapter.py:706).
mbridge_core.unwrap_model = unwrap_model


class _LocalLayers:
    """A mixin for an mbridge bridge class: uses local layer specs, under mbridge's names for fused layers."""

    config: Any

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        merged = {**kwargs, **LOCAL_LAYER_SETTINGS}
        return super()._build_base_config(text_config_key, **merged)  # type: ignore[misc]

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        self.has_vp_stage = True
        return decoder_block_spec(self.config, vp_stage=vp_stage)

    def _view(self, model: torch.nn.Module) -> torch.nn.Module:
        return FusedNameView(model, self.config)


class _AnyLayout:
    """A mixin for an mbridge bridge class: loads weights one by one, and exports from every layout."""

    hf_config: Any
    config: Any
    mpu: Any
    _DIRECT_MAPPING: dict[str, str]

    def _view(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def _adjust_mapping_for_shared_weights(self) -> None:
        # The last of several pipeline stages has an output layer to load. Only mbridge's Qwen bridges map it
        # (models/qwen2.py), and they write into the class attribute, which would tie the embeddings of later bridges.
        if self._is_tied:
            self._DIRECT_MAPPING = {**self._DIRECT_MAPPING, "output_layer.weight": "model.embed_tokens.weight"}

    @property
    def _is_tied(self) -> bool:
        return bool(getattr(self.hf_config, "tie_word_embeddings", False))

    def _views(self, models: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        return [self._view(unwrap_model(model)) for model in models]

    def load_weights(self, models: Sequence[torch.nn.Module], weights_path: str) -> None:
        """Loads HF weights. Every rank reads its own shards from the files. Not collective.

        mbridge scatters the shards from the first rank of each group (core/bridge.py:227, 246), even in a group of one
        rank. NCCL implements a scatter with sends, and allocates channels to every peer for them.
        """
        reader = HfReader(weights_path)
        for view in self._views(models):
            state = view.state_dict()
            for local_name, name in self._weight_name_mapping_mcore_local_to_global(view).items():  # type: ignore[attr-defined]
                hf_names = self._weight_name_mapping_mcore_to_hf(name)  # type: ignore[attr-defined]
                whole = self._weight_to_mcore_format(  # type: ignore[attr-defined]
                    local_name, [reader.load_one_hf_weight(hf_name) for hf_name in hf_names]
                )
                self._load_shard(local_name, state[local_name], whole)

    def _load_shard(self, local_name: str, parameter: torch.Tensor, whole: torch.Tensor) -> None:
        is_value_head = parameter.shape[:1] == (1,) and whole.shape[:1] != (1,)
        if is_value_head and local_name.endswith(("output_layer.weight", "word_embeddings.weight")):
            return  # a critic's value head is not in the files; mbridge skips it, too
        is_expert = EXPERT_WEIGHT in local_name
        size, rank = (self.mpu.etp_size, self.mpu.etp_rank) if is_expert else (self.mpu.tp_size, self.mpu.tp_rank)
        parameter.copy_(self._weight_split_across_tp(local_name, whole, parameter, size)[rank])  # type: ignore[attr-defined]

    def export_weights(self, models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        views = self._views(models)
        num_experts = self.config.num_moe_experts or 0
        for name, shards, announced in export_shards(views, self._names(views), self.mpu, num_experts=num_experts):
            if self._is_left_out(name):
                continue
            hf_names, hf_weights = self._to_hf(name, shards, announced)
            yield from zip(hf_names, hf_weights, strict=True)
            del hf_weights

    def own_weights(self, models: Sequence[torch.nn.Module]) -> list[OwnWeight]:
        views = self._views(models)
        return own_weights(
            views,
            self._names(views),
            self.mpu,
            self._to_hf,
            num_experts=self.config.num_moe_experts or 0,
            leave_out=self._is_left_out,
        )

    def _names(self, views: Sequence[torch.nn.Module]) -> list[dict[str, str]]:
        return [self._weight_name_mapping_mcore_local_to_global(view, consider_ep=False) for view in views]  # type: ignore[attr-defined]

    def _is_left_out(self, name: str) -> bool:
        """Returns True for the last stage's copy of a tied embedding. HF files hold that weight only once."""
        return self._is_tied and name == "output_layer.weight"

    def _to_hf(self, name: str, shards: list[torch.Tensor], announced: Any) -> tuple[list[str], list[torch.Tensor]]:
        """Builds the HF weights from a parameter's shards, and clears the list of shards."""
        whole = self._weight_merge_across_tp(name, shards, announced)
        shards.clear()  # frees them: the merged tensor holds their data
        hf: tuple[list[str], list[torch.Tensor]] = self._weight_to_hf_format(name, whole)  # type: ignore[attr-defined]
        return hf

    def _weight_merge_across_tp(self, name: str, shards: list[torch.Tensor], param: Any) -> torch.Tensor:
        """Merges shards as mbridge does, but with one copy.

        mbridge asserts that experts have the same tensor-parallel size as the rest (core/bridge.py:852, 856), and
        copies gated layers twice (core/bridge.py:876).
        """
        if len(shards) == 1:
            return shards[0]
        if "linear_fc1.weight" in name and self.config.gated_linear_unit:
            return torch.cat([shard.chunk(2)[half] for half in (0, 1) for shard in shards])
        sizes = self.mpu
        if EXPERT_WEIGHT in name:
            self.mpu = replace(sizes, tp_size=sizes.etp_size)
        try:
            merged: torch.Tensor = super()._weight_merge_across_tp(name, shards, param)  # type: ignore[misc]
        finally:
            self.mpu = sizes
        return merged


class _NewerLibraries:
    """A mixin for an mbridge bridge class: handles settings that transformers 5 moved or megatron-core 0.16 renamed."""

    hf_config: Any
    extra_args: dict[str, Any]

    def __init__(self, hf_config: Any, **kwargs: Any) -> None:
        if getattr(hf_config, "head_dim", 0) is None:
            # None is Mixtral's default, but mbridge multiplies with head_dim (core/bridge.py:736).
            hf_config.head_dim = hf_config.hidden_size // hf_config.num_attention_heads
        if not hasattr(hf_config, "rope_theta"):
            hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]  # models/deepseek_v3.py:157
        super().__init__(hf_config, **kwargs)  # type: ignore[call-arg]

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        if "max_position_embeddings" in kwargs:  # models/deepseek_v3.py:162, for latent attention
            kwargs["original_max_position_embeddings"] = kwargs.pop("max_position_embeddings")
        if self.extra_args.get("moe_token_dispatcher_type", "alltoall") != "alltoall":
            # models/qwen2moe.py:74 and others set it; transformer_config.py:1090 refuses it beside other dispatchers.
            kwargs["moe_shared_expert_overlap"] = False
        return super()._build_base_config(text_config_key, **kwargs)  # type: ignore[misc]

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {
            "vocab_size": self.hf_config.vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            **self._rope_args(self.hf_config.rope_parameters),
        }

    def _rope_args(self, parameters: dict[str, Any]) -> dict[str, Any]:
        args = {
            "rotary_base": parameters["rope_theta"],
            "rotary_percent": parameters.get("partial_rotary_factor", 1.0),
        }
        check_rope(self.hf_config.model_type, parameters)
        if parameters.get("rope_type", "default") == "default":
            return args
        return {**args, "rope_scaling": True, "rope_scaling_factor": parameters["factor"]}


class _FamilySettings:
    """A mixin for an mbridge bridge class: sets what mbridge leaves out, or gets wrong, for a family."""

    hf_config: Any

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        merged = {**kwargs, **family_settings(self.hf_config)}
        if "original_max_position_embeddings" in merged:
            merged.pop("max_position_embeddings", None)  # models/deepseek_v3.py:162 means the same by it
        return super()._build_base_config(text_config_key, **merged)  # type: ignore[misc]


class _Qwen2Moe:
    """A mixin for mbridge's Qwen2-MoE: builds the gate of the shared expert, which mbridge maps but never builds.

    models/qwen2moe.py:53 maps ``gate_weight``, but the config of models/qwen2moe.py:65 leaves it out.
    """

    hf_config: Any

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        merged = {**kwargs, "moe_shared_expert_gate": True, "add_qkv_bias": self.hf_config.qkv_bias}
        return super()._build_base_config(text_config_key, **merged)  # type: ignore[misc]


class _Glm4Moe:
    """A mixin for mbridge's GLM-4-MoE: adds biases to Q, K and V only if the model has them (models/glm4moe.py:147)."""

    hf_config: Any

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        merged = {**kwargs, "add_qkv_bias": self.hf_config.attention_bias}
        return super()._build_base_config(text_config_key, **merged)  # type: ignore[misc]


class _DeepseekV3:
    """A mixin for mbridge's DeepSeek-V3: gives the model no rotary embeddings, because latent attention has its own."""

    def _rope_args(self, parameters: dict[str, Any]) -> dict[str, Any]:
        return {"rotary_base": parameters["rope_theta"]}


_OWN_MIXINS: Mapping[str, type] = {"deepseek_v3": _DeepseekV3, "glm4_moe": _Glm4Moe, "qwen2_moe": _Qwen2Moe}
"""Corrections for a single model type."""


def open_mbridge(
    hf_config: PretrainedConfig, *, dtype: torch.dtype, settings: dict[str, Any], transformer_engine: bool
) -> Any | None:
    """Returns mbridge's bridge for a model, with our corrections; None if mbridge has no mapping for the model type.

    Args:
        hf_config: The model's configuration.
        dtype: Parameter dtype of the Megatron model.
        settings: Fields of Megatron's TransformerConfig that override the bridge's own.
        transformer_engine: True for Transformer Engine's layers, False for Megatron's local ones.
    """
    base = mbridge_core._MODEL_REGISTRY.get(hf_config.model_type)
    if base is None:
        return None
    mixins: list[type] = [_FamilySettings, _AnyLayout, _NewerLibraries]
    if (own := _OWN_MIXINS.get(hf_config.model_type)) is not None:
        mixins.insert(0, own)
    if not transformer_engine:
        mixins.insert(0, _LocalLayers)
    bridge = type(f"Safe{base.__name__}", (*mixins, base), {})(hf_config, dtype=dtype)
    bridge.set_extra_args(**settings)
    return bridge
