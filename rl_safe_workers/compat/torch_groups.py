"""Reads and changes this process's registry of groups in torch, and Megatron's own list of groups.

Both are private. Seen in torch 2.11 and 2.13, and in megatron-core 0.16.1, 0.19.2 and 0.20.0. No function is
collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from megatron.core import parallel_state
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d


def registered_groups() -> tuple[Any, ...]:
    """Returns every group that this process is a member of, in the order of their creation."""
    return tuple(c10d._world.pg_map)


def megatron_groups() -> list[Any]:
    """Returns this rank's Megatron groups in the order of their creation; None stands for the default group."""
    return list(parallel_state._global_process_group_list or ())


def backends_of(group: ProcessGroup) -> list[Any]:
    """Returns a group's backends, one for each kind of device."""
    return [group._get_backend(device) for device in group._device_types]


def default_store() -> Any:
    """Returns the store that the default group was made over."""
    return c10d._get_default_store()


def make_default(group: Any) -> None:
    """Makes a group the default group. Existing groups stay registered."""
    c10d._update_default_pg(group)


def set_members(group: Any, members: Sequence[int]) -> None:
    """Gives a group its rank map: ``members[i]`` is the global rank of its rank ``i``."""
    c10d._world.pg_group_ranks[group] = {member: index for index, member in enumerate(members)}


def forget_members(group: Any) -> None:
    """Removes a group's rank map, if it has one."""
    c10d._world.pg_group_ranks.pop(group, None)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Sets the timeout of a group's later collectives."""
    c10d._set_pg_timeout(timeout, group)


def group_count() -> int:
    """Returns the counter from which torch makes the next group's name."""
    return int(c10d._world.group_count)


def reset_group_count(count: int) -> None:
    """Sets the counter of `group_count` back, so that the next group gets the same name as in other processes."""
    c10d._world.group_count = count


def forget_names() -> None:
    """Empties the list of groups that ``destroy_process_group()`` would shut down one after the other."""
    c10d._world.pg_names.clear()
