"""Provides the fields of TransformerConfig that the weight bridges leave out or set to another model's value."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.enums import AttnBackend
from transformers import PretrainedConfig

from rl_safe_workers.errors import ModelError
from rl_safe_workers.topology.layout import check_rope


def family_settings(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Returns the fields that this model needs.

    Raises:
        ModelError: If megatron-core would compute something different from the model.
    """
    match hf_config.model_type:
        case "deepseek_v3":
            return {**_sigmoid_router(hf_config), **_latent_rope(hf_config)}
        case "glm4_moe":
            return _sigmoid_router(hf_config)
        case "gpt_oss":
            return _gpt_oss(hf_config)
        case "mixtral" | "olmoe" | "qwen2_moe" | "qwen3_moe":
            # mbridge never normalises the probabilities of Mixtral and Qwen2-MoE, and always normalises Qwen3-MoE's
            # (models/mixtral.py:92, models/qwen2moe.py:82, models/qwen3moe.py:28). Megatron-Bridge never normalises
            # OLMoE's (models/olmoe/olmoe_bridge.py:86).
            return {"moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True)}
    return {}


def _sigmoid_router(hf: PretrainedConfig) -> dict[str, Any]:
    """Returns settings to route within groups of experts, and to build no MTP layers.

    mbridge ignores the groups (models/deepseek_v3.py:119, models/glm4moe.py:118). Both bridges count one shared expert
    in GLM-4-MoE (mbridge: models/glm4moe.py:149; Megatron-Bridge: models/glm/glm45_bridge.py:87). If a number of MTP
    layers is set, even 0 (mbridge: models/deepseek_v3.py:115), megatron-core's forward pass needs labels. See
    `hf_reader.mtp_weights`.
    """
    if not hf.norm_topk_prob or hf.num_experts_per_tok < 2:
        # moe/moe_utils.py:724 normalises the probabilities of two experts or more, but never that of one.
        raise ModelError(
            f"norm_topk_prob={hf.norm_topk_prob} with num_experts_per_tok={hf.num_experts_per_tok} is not supported"
            f" for {hf.model_type}: only norm_topk_prob=true with two experts or more is"
        )
    if hf.n_group > 1 and hf.num_experts_per_tok != 2 * hf.topk_group:
        # moe/moe_utils.py:554 judges a group by its best topk // group_topk experts, the model by its best two.
        raise ModelError(
            f"num_experts_per_tok={hf.num_experts_per_tok} with topk_group={hf.topk_group} is not supported: "
            "megatron-core needs two experts of each chosen group"
        )
    return {
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts or None,
        "mtp_num_layers": None,
        "moe_router_num_groups": hf.n_group if hf.n_group > 1 else None,
        "moe_router_group_topk": hf.topk_group if hf.n_group > 1 else None,
    }


def _latent_rope(hf: PretrainedConfig) -> dict[str, Any]:
    """Returns DeepSeek-V3's settings for YaRN, from the place where transformers 5 keeps them.

    mbridge looks for ``rope_scaling`` (models/deepseek_v3.py:105), which a configuration of transformers 5 does not
    contain. Its default of ``mscale_all_dim`` is not that of transformers.
    """
    rope = hf.rope_parameters
    check_rope("deepseek_v3", rope)
    if not hf.rope_interleave:
        # common/embeddings/rope_utils.py:118 always de-interleaves the pairs.
        raise ModelError("rope_interleave=false is not supported: only true is")
    # mbridge asks for fused attention (models/deepseek_v3.py:122). megatron-core would apply this to the whole process
    # (models/common/language_module/language_module.py:115), but another model or the user may have chosen otherwise.
    backend = {"attention_backend": AttnBackend.auto}
    if rope.get("rope_type") != "yarn":
        return backend
    return {
        **backend,
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast", 32),
        "beta_slow": rope.get("beta_slow", 1),
        "mscale": rope.get("mscale", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
    }


def _gpt_oss(hf: PretrainedConfig) -> dict[str, Any]:
    """Returns the settings that Megatron-Bridge takes from published models (models/gpt_oss/gpt_oss_bridge.py:88)."""
    rope = hf.rope_parameters
    check_rope("gpt_oss", rope)
    layers = {"window_attn_skip_freq": [int(kind == "sliding_attention") for kind in hf.layer_types]}
    if rope.get("rope_type") != "yarn":
        return {**layers, "position_embedding_type": "rope"}
    return {
        **layers,
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope.get("beta_fast", 32.0),
        "yarn_beta_slow": rope.get("beta_slow", 1.0),
        "yarn_correction_range_round_to_int": rope.get("truncate", True),
    }
