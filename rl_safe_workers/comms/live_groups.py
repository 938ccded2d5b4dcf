"""Lists every live communicator of the training world, and tells its kind.

Megatron lists the groups that this rank belongs to, in creation order. Torch knows names, backends and ranks of all
groups. Aliases (several getters for one group) make one entry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rl_safe_workers.compat import torch_groups
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.topology.groups import HOST_KINDS, KINDS, UNUSED, WORLD, GroupKind


@dataclass(frozen=True, kw_only=True)
class LiveGroup:
    """One communicator that this rank is a member of.

    Example: ``LiveGroup(description="EXPERT_DATA_PARALLEL_GROUP", ranks=(0, 2), backend="gloo", group=...,
    is_megatrons=True)``
    """

    description: str
    """Megatron's ``group_desc``; ``"WORLD"`` for the default group."""
    ranks: tuple[int, ...]
    """Training ranks of the members, in group order."""
    backend: str
    group: Any
    """The torch ProcessGroup."""
    is_megatrons: bool
    """True if it is the default group or in Megatron's list; False if another program created it."""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def is_known(self) -> bool:
        """True if the table of groups knows the group, even if it carries nothing."""
        # Only a host sends anything over Megatron's gloo twins for CPU tensors.
        unused = self.description in UNUSED or self.description.endswith("_GLOO")
        return self.kind is not None or (self.is_megatrons and unused)

    @property
    def kind(self) -> GroupKind | None:
        """The kind of the group; None if the group carries nothing, or the table does not know it."""
        known = KINDS.get(self.description) if self.is_megatrons else None
        return known or HOST_KINDS.get(self.description)

    def __str__(self) -> str:
        return f"{self.description} {list(self.ranks)}"


def _describe(group: Any, description: str, *, is_megatrons: bool = True) -> LiveGroup:
    return LiveGroup(
        description=description,
        ranks=tuple(dist.get_process_group_ranks(group)),
        backend=dist.get_backend(group),
        group=group,
        is_megatrons=is_megatrons,
    )


def live_groups(*, elsewhere: Collection[Any] = ()) -> list[LiveGroup]:
    """Lists the default group, this rank's Megatron groups, and any other, each in creation order. Not collective.

    Args:
        elsewhere: Groups of the process that do not belong to the training world, such as a host's in carved mode.

    Raises:
        CommunicatorError: If Megatron's groups do not exist (yet, or any more).
    """
    listed = torch_groups.megatron_groups()
    if not dist.is_initialized() or not listed:
        raise CommunicatorError("Megatron's process groups do not exist: call initialize_model_parallel first")
    world = dist.group.WORLD
    assert world is not None, "an initialised torch.distributed has a default group"
    groups, seen = [_describe(world, WORLD)], {id(world), *map(id, elsewhere)}
    for group in listed:
        # None stands for the default group, listed above.
        if group is not None and id(group) not in seen:
            seen.add(id(group))
            groups.append(_describe(group, group.group_desc))
    groups += [_describe(group, _name(group), is_megatrons=False) for group in _others(seen)]
    return groups


def _others(seen: Collection[int]) -> Iterator[Any]:
    yield from (group for group in torch_groups.registered_groups() if id(group) not in seen)


def _name(group: Any) -> str:
    return str(getattr(group, "group_desc", "") or group.group_name)
