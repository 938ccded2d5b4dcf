"""Creates groups before the bootstrap that mcore-bridge and ms-swift would create only after it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state


def create_ep_pp_groups(gpt_bridge: Any, *, timeout: timedelta) -> None:
    """Creates mcore-bridge's groups of expert and pipeline parallelism, and stores them for mcore-bridge to find.

    mcore-bridge creates them with the first model, unless they exist (bridge/gpt_bridge.py:96-116).

    Collective over: the training world.

    Args:
        gpt_bridge: The module ``mcore_bridge.bridge.gpt_bridge``.
        timeout: Longest wait of one collective.
    """
    if gpt_bridge.EP_PP_GROUP is not None:
        return
    expert_tensor = parallel_state.get_expert_tensor_parallel_world_size()
    expert = parallel_state.get_expert_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    generator = parallel_state.RankGenerator(
        tp=expert_tensor,
        ep=expert,
        dp=dist.get_world_size() // expert_tensor // expert // pipeline,
        pp=pipeline,
        cp=1,
        order="tp-cp-ep-dp-pp",
        rank_offset=0,
    )
    for ranks in generator.get_ranks("ep-pp"):
        group = parallel_state.create_group(ranks, timeout=timeout, group_desc="EP-PP-GROUP")
        if dist.get_rank() in ranks:
            gpt_bridge.EP_PP_GROUP = group
            gpt_bridge.EP_PP_SIZE, gpt_bridge.EP_PP_RANK = expert * pipeline, dist.get_rank(group)


def create_rollout_groups(*, timeout: timedelta) -> Any:
    """Creates the groups of ranks with the same samples, like ms-swift's ``create_rollout_group``.

    Collective over: the training world.

    Args:
        timeout: Longest wait of one collective.

    Returns:
        This rank's group; None without context parallelism, where ms-swift uses one of Megatron's groups.
    """
    context = parallel_state.get_context_parallel_world_size()
    if context == 1:
        return None
    generator = parallel_state.RankGenerator(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        ep=1,
        dp=parallel_state.get_data_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        cp=context,
        order="tp-cp-ep-dp-pp",
        rank_offset=0,
    )
    own = None
    for ranks in generator.get_ranks("tp-cp-ep-pp"):
        group = parallel_state.create_group(sorted(ranks), timeout=timeout, group_desc="ROLLOUT_GROUP")
        if dist.get_rank() in ranks:
            own = group
    return own
