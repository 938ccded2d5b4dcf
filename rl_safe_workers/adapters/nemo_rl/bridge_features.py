"""Reads from Megatron-Bridge's configuration which collectives Megatron's groups will carry."""

from __future__ import annotations

from typing import Any

from rl_safe_workers.topology.groups import Features, context_exchange, dispatcher_of, reduces_scales

_HYBRID = ("is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern")
"""Fields that show that a model also has Mamba layers."""


def features_of(megatron_cfg: Any) -> Features:
    """Returns the features of a run.

    Args:
        megatron_cfg: Bridge's ``ConfigContainer`` as NeMo RL has filled it, with the model's provider as ``model``.
    """
    model, ddp = megatron_cfg.model, megatron_cfg.ddp
    is_hybrid = any(getattr(model, name, None) for name in _HYBRID)
    balancing = getattr(model, "moe_router_load_balancing_type", "none")
    return Features(
        moe_dispatcher=dispatcher_of(getattr(model, "moe_token_dispatcher_type", None)),
        moe=bool(getattr(model, "num_moe_experts", None)),
        tied_embeddings=bool(getattr(model, "share_embeddings_and_output_weights", True)),
        batched_p2p=getattr(model, "batch_p2p_comm", None),
        variable_seq_lengths=getattr(model, "variable_seq_lengths", None),
        virtual_pipeline=getattr(model, "virtual_pipeline_model_parallel_size", None) is not None,
        distributed_optimizer=bool(getattr(ddp, "use_distributed_optimizer", True)),
        fp8=reduces_scales(getattr(model, "fp8", None), getattr(model, "fp8_recipe", None)),
        expert_bias=bool(getattr(model, "moe_router_enable_expert_bias", False)),
        aux_loss=balancing not in (None, "none"),
        context_exchange=context_exchange(getattr(model, "cp_comm_type", None), is_hybrid=is_hybrid),
        optimizer_instances=int(getattr(ddp, "num_distributed_optimizer_instances", 1) or 1),
    )
