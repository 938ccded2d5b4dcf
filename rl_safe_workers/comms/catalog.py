"""The catalog: every live communicator of the training world that Megatron has created.

Megatron keeps its own list of the groups that this rank belongs to, in creation order; torch keeps names,
backends and ranks. Aliases (several getters for one group) are one entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.errors import CommunicatorError


class OpClass(StrEnum):
    """The kinds of collective that a communicator connects separately."""

    REDUCE = "reduce"
    """all_reduce, broadcast, barrier."""
    GATHER_SCATTER = "gather_scatter"
    """all_gather, reduce_scatter."""
    ALL_TO_ALL = "all_to_all"
    P2P = "p2p"
    """send and receive between pipeline neighbours, batched and one by one."""


EXPERT_DATA_PARALLEL = "EXPERT_DATA_PARALLEL_GROUP"
_ALL_TO_ALL = ("EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
_GATHER_SCATTER = ("DATA_PARALLEL", "TENSOR", "CONTEXT", "EXPERT", "PIPELINE_MODEL", "WORLD")


def op_classes(description: str, *, moe_dispatcher: str) -> tuple[OpClass, ...]:
    """Returns what a group of this description will carry.

    Args:
        description: Megatron's ``group_desc``, e.g. ``"EXPERT_DATA_PARALLEL_GROUP"``.
        moe_dispatcher: ``"alltoall"`` or ``"allgather"``.
    """
    classes = [OpClass.REDUCE]
    if description.startswith(_GATHER_SCATTER) or description.startswith("INTRA"):
        classes.append(OpClass.GATHER_SCATTER)
    if description in _ALL_TO_ALL and moe_dispatcher == "alltoall":
        classes.append(OpClass.ALL_TO_ALL)
    if description == "PIPELINE_MODEL_PARALLEL_GROUP":
        classes.append(OpClass.P2P)
    return tuple(classes)


@dataclass(frozen=True, kw_only=True)
class LiveGroup:
    """One communicator that this rank is a member of.

    Example: ``LiveGroup(description="EXPERT_DATA_PARALLEL_GROUP", ranks=(0, 2), backend="gloo", group=...)``
    """

    description: str
    """Megatron's ``group_desc``; ``"WORLD"`` for the default group."""
    ranks: tuple[int, ...]
    """Training ranks of the members, in group order."""
    backend: str
    group: Any
    """The torch ProcessGroup."""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


def _describe(group: dist.ProcessGroup, description: str) -> LiveGroup:
    return LiveGroup(
        description=description,
        ranks=tuple(dist.get_process_group_ranks(group)),
        backend=dist.get_backend(group),
        group=group,
    )


def live_groups() -> list[LiveGroup]:
    """Lists the default group and this rank's Megatron groups, in creation order. Not collective.

    Raises:
        CommunicatorError: If Megatron's groups do not exist (yet, or any more).
    """
    listed = parallel_state._global_process_group_list
    if not dist.is_initialized() or not listed:
        raise CommunicatorError("Megatron's process groups do not exist: call initialize_model_parallel first")
    world = dist.group.WORLD
    assert world is not None, "an initialised torch.distributed has a default group"
    groups, seen = [_describe(world, "WORLD")], {id(world)}
    for group in listed:
        # None stands for the default group, listed above.
        if group is not None and id(group) not in seen:
            seen.add(id(group))
            groups.append(_describe(group, group.group_desc))
    return groups
