"""Has each save write 18,720 sharded tensors a rank in place of the model: a plugin for --external_plugins."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from swift.megatron.trainers.base import BaseMegatronTrainer
from swift.megatron.utils import megatron_lm_utils

from benchmarks.inventory import MoeInventory

EP, EXPERT_DP = 2, 2
generate, train = megatron_lm_utils._generate_state_dict, BaseMegatronTrainer.train
inventory: dict[str, Any] = {}


def with_inventory(*args: Any, **kwargs: Any) -> Any:
    state = generate(*args, **kwargs)
    state.pop("optimizer", None)
    state["model"] = dict(inventory)
    return state


def train_later(*args: Any, **kwargs: Any) -> Any:
    # Making them is no part of a save.
    inventory.update(MoeInventory().shards(dist.get_rank(), ep=EP, expert_dp=EXPERT_DP))
    assert len(inventory) == 18_720
    return train(*args, **kwargs)


megatron_lm_utils._generate_state_dict = with_inventory
BaseMegatronTrainer.train = train_later
