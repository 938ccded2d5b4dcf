"""Reads from verl's configuration which collectives Megatron's groups will carry."""

from __future__ import annotations

from typing import Any

from rl_safe_workers.topology.groups import Features, context_exchange, dispatcher_of, reduces_scales

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Attributes in which HF configurations keep the number of experts."""


def features_of(hf_config: Any, engine_config: Any, *, weights_over_world: bool = False) -> Features:
    """Returns the features of a model under verl's engine.

    The defaults here are the values that verl sets (transformer_impl.py:365-372). ``override_transformer_config``
    overrides them.

    Args:
        hf_config: transformers' configuration of the model.
        engine_config: verl's ``McoreEngineConfig``.
        weights_over_world: True if weight syncs use the default group.
    """
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    overrides = dict(engine_config.override_transformer_config or {})
    ddp = dict(engine_config.override_ddp_config or {})
    return Features(
        moe_dispatcher=dispatcher_of(overrides.get("moe_token_dispatcher_type")),
        moe=any((getattr(text, name, 0) or 0) > 0 for name in _EXPERTS),
        tied_embeddings=bool(getattr(hf_config, "tie_word_embeddings", True)),
        batched_p2p=bool(overrides.get("batch_p2p_comm", False)),
        variable_seq_lengths=bool(overrides.get("variable_seq_lengths", True)),
        virtual_pipeline=engine_config.virtual_pipeline_model_parallel_size is not None,
        distributed_optimizer=engine_config.use_distributed_optimizer,
        fp8=reduces_scales(overrides.get("fp8"), overrides.get("fp8_recipe")),
        expert_bias=bool(overrides.get("moe_router_enable_expert_bias", getattr(text, "n_routed_experts", 0))),
        aux_loss=overrides.get("moe_router_load_balancing_type", "none") != "none",
        context_exchange=context_exchange(overrides.get("cp_comm_type"), is_hybrid=_is_hybrid(text)),
        weights_over_world=weights_over_world,
        optimizer_instances=int(ddp.get("num_distributed_optimizer_instances", 1)),
    )


def _is_hybrid(text: Any) -> bool:
    return bool(getattr(text, "hybrid_override_pattern", None))
