"""Creates Megatron's groups over the training world."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.config import MegatronConfig


def init_megatron_groups(config: MegatronConfig, *, seed: int, timeout: timedelta) -> None:
    """Creates every Megatron group and seeds its RNG tracker. Collective over: the training world.

    Gloo twins of the data-parallel groups are not created: nothing here uses them, and each costs a connection.

    Args:
        config: The parallel sizes.
        seed: Base seed; Megatron offsets it by tensor, pipeline and expert rank.
        timeout: Longest wait of one collective of these groups. New groups do not inherit the default group's.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        # Annotated as an int; Megatron makes a timedelta of it, which takes a fraction.
        distributed_timeout_minutes=timeout.total_seconds() / 60,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def set_group_timeouts(timeout: timedelta) -> None:
    """Bounds every later collective of the training world's groups. Not collective; microseconds.

    Groups keep the timeout that they were created with, and a new group does not inherit its parent's; without this a
    collective of a one-minute phase could wait for as long as the longest phase may take.
    """
    if dist.is_initialized():
        groups = [g for g in parallel_state._global_process_group_list or [] if g is not None]
        for group in [dist.group.WORLD, *groups]:
            c10d._set_pg_timeout(timeout, group)
