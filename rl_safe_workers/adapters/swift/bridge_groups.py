"""The groups that mcore-bridge would create after the bootstrap, created in time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state


def create_ep_pp_groups(gpt_bridge: Any, *, timeout: timedelta) -> None:
    """Creates mcore-bridge's groups of expert and pipeline parallelism where it looks for them.

    mcore-bridge creates them with the first model, unless they are there (bridge/gpt_bridge.py:96-116).

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
