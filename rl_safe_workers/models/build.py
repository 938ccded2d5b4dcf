"""Builds the Megatron model of one training rank."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

from rl_safe_workers.config import OptimConfig


def build_chunks(bridge: Any) -> list[torch.nn.Module]:
    """Builds this rank's part of the model, not yet wrapped for data parallelism.

    Args:
        bridge: The result of ``open_bridge``.

    Returns:
        One GPTModel, or one for each virtual pipeline stage. It holds this rank's pipeline stage and its TP and EP
        shards. With bf16 or fp16 it is wrapped in Float16Module.
    """
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return [_build_chunk(bridge, vp_stage) for vp_stage in ([None] if stages is None else range(stages))]


def _build_chunk(bridge: Any, vp_stage: int | None) -> torch.nn.Module:
    model: torch.nn.Module = bridge._model_provider([])(
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        **({} if vp_stage is None else {"vp_stage": vp_stage}),
    )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.cuda(torch.cuda.current_device())
    if bridge.config.bf16 or bridge.config.fp16:
        model = Float16Module(bridge.config, model)
    return model


def wrap_data_parallel(
    chunks: list[torch.nn.Module], config: Any, *, optimizer_instances: int = 1
) -> list[DistributedDataParallel]:
    """Wraps model chunks for the distributed optimizer. Collective over: each data-parallel group.

    Gradients are accumulated and reduced in fp32. Parameters move into one contiguous buffer per dtype.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=optimizer_instances,
    )
    return [DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk) for chunk in chunks]


def build_optimizer(chunks: list[DistributedDataParallel], config: OptimConfig, *, dtype: torch.dtype) -> Any:
    """Builds Megatron's DistributedOptimizer over Adam. Collective over: the training world.

    ``get_megatron_optimizer`` gathers parameter groups on the default group (optimizer/__init__.py:181), so the
    default group must be the training world.
    """
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
