"""Reads from ms-swift's arguments which collectives Megatron's groups will carry."""

from __future__ import annotations

from typing import Any

from rl_safe_workers.topology.groups import Features, context_exchange, dispatcher_of, reduces_scales


def features_of(args: Any) -> Features:
    """Returns the features of a job.

    Args:
        args: ms-swift's ``MegatronArguments``, as they are when ms-swift creates the groups.
    """
    balancing = getattr(args, "moe_router_load_balancing_type", None)
    balancings = {balancing} if isinstance(balancing, str) else set(balancing or ())
    virtual = args.virtual_pipeline_model_parallel_size is not None
    return Features(
        moe_dispatcher=dispatcher_of(args.moe_token_dispatcher_type),
        moe=bool(args.model_info.is_moe_model),
        tied_embeddings=not getattr(args, "untie_embeddings_and_output_weights", False),
        # batch_p2p_comm is on without virtual stages (arguments/megatron_args.py:1116).
        batched_p2p=not virtual,
        virtual_pipeline=virtual,
        distributed_optimizer=bool(args.use_distributed_optimizer),
        fp8=reduces_scales(getattr(args, "fp8_format", None), getattr(args, "fp8_recipe", None)),
        expert_bias=bool(getattr(args, "moe_router_enable_expert_bias", False)),
        # If the setting is absent, the model's own configuration decides.
        aux_loss=bool(args.model_info.is_moe_model) and balancings != {"none"},
        context_exchange=context_exchange(getattr(args, "cp_comm_type", None)),
        # ms-swift replaces Megatron's function that sends in batches (megatron/init.py:23).
        p2p_over_world=not virtual,
    )
