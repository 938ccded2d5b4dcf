"""Prints the rollout groups of several layouts as JSON, ours and ms-swift's: no process group is made."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state

from rl_safe_workers.adapters.swift.bridge_groups import create_rollout_groups

NAMES = ("tensor_model", "context", "pipeline_model", "data")
LAYOUTS = [(1, 2, 1, 1), (2, 2, 1, 1), (1, 2, 2, 2), (2, 2, 2, 2), (1, 1, 2, 2)]


def groups_of(sizes: tuple[int, ...]) -> dict[str, Any]:
    """The groups of one layout, and the one that ms-swift's function returns if ours is there before."""
    from swift.megatron.trainers.rollout_mixin import create_rollout_group

    made: dict[str, Any] = {"ours": [], "stock": [], "context": sizes[1]}

    def noting(who: str) -> Any:
        return lambda ranks, **more: made[who].append(list(ranks)) or tuple(ranks)

    for name, size in zip(NAMES, sizes, strict=True):
        setattr(parallel_state, f"get_{name}_parallel_world_size", lambda size=size: size)
    torch.distributed.get_rank = lambda: 0  # type: ignore[assignment]
    parallel_state.create_group, torch.distributed.new_group = noting("ours"), noting("stock")
    parallel_state.get_model_parallel_group = lambda: "model parallel"
    own = create_rollout_groups(timeout=timedelta(seconds=1))
    found = create_rollout_group(SimpleNamespace(_rollout_group=None, _rollout_groups_created=False))
    count = len(made["stock"])
    again = create_rollout_group(SimpleNamespace(_rollout_group=own, _rollout_groups_created=False))
    made["creates_again"] = own is not None and (again is not own or len(made["stock"]) != count)
    return {**made, "same": (own or "model parallel") == found}


if __name__ == "__main__":
    sys.stdout.write(json.dumps([groups_of(sizes) for sizes in LAYOUTS]) + "\n")
