"""Shows in a few lines how other projects warm up communicators before the first step.

Each function is collective over the training world. Call it after Megatron's groups were made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state

Warmup = Callable[[torch.device], None]


def nothing(device: torch.device) -> None:
    """Leaves every communicator to its first collective, as Megatron does."""


def eight_groups(device: torch.device) -> None:
    """Runs a one-element all_reduce on eight groups, like ms-swift 9602 (swift/megatron/trainers/base.py:623-655)."""
    groups = (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_data_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_model_parallel_group(),
        parallel_state.get_embedding_group(check_initialized=False),
        parallel_state.get_position_embedding_group(check_initialized=False),
    )
    for group in groups:
        if group is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


def partial_expert_barrier(device: torch.device) -> None:
    """Runs a barrier on the group between the parts of expert data parallelism, if any, like ms-swift 9486."""
    group = parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)
    if group is not None:
        dist.barrier(group=group)


def every_group(device: torch.device) -> None:
    """Runs an all_reduce of one element on every group that Megatron has made, whatever its size."""
    seen = set()
    for group in [dist.group.WORLD, *parallel_state._global_process_group_list]:
        if group is not None and id(group) not in seen:
            seen.add(id(group))
            dist.all_reduce(torch.zeros(1, device=device), group=group)


WARMUPS: Mapping[str, Warmup] = {
    "nothing": nothing,
    "eight groups": eight_groups,
    "a barrier": partial_expert_barrier,
    "every group": every_group,
}
"""The warm-ups, by their names in the table."""
