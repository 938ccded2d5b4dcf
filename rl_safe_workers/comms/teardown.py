"""Ends the groups of the training world: all of them destroyed at once, or aborted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.comms.ending import Named, end_alone, end_together
from rl_safe_workers.comms.releasable import ReleasableGroup
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.worlds.training_world import TrainingWorld

logger = logging.getLogger(__name__)


def destroy_groups(world: TrainingWorld, *, timeout: timedelta) -> None:
    """Destroys the training world's groups and clears Megatron's globals. Collective over: the training world.

    In isolated mode that is every group of the process; in carved mode the host's groups stay, and its default group is
    the default one again. All end at once: one by one in the order of their creation they deadlock where members hold
    different subsets, such as embedding groups at four pipeline stages, and NCCL takes a third of a second for each.
    Idempotent.

    Args:
        world: What to destroy.
        timeout: Longest time for it. NCCL itself waits for a peer without end.

    Raises:
        CommunicatorError: If a group could not be ended together with its other members; all were then aborted.
    """
    parallel_state.destroy_model_parallel()
    if not dist.is_initialized():
        return
    ours = _groups(world)
    failure = end_together(_backends(ours), timeout)
    if world.host_group is None:
        # torch goes by these names to shut every group down once more, one after the other.
        c10d._world.pg_names.clear()
        dist.destroy_process_group()
    else:
        c10d._update_default_pg(world.host_group)
        for group in ours:
            dist.destroy_process_group(group)
        # The next group of the host gets the name that it has on the rollout ranks, which created none of ours.
        c10d._world.group_count = world.host_group_count
    if failure is not None:
        raise CommunicatorError(f"the groups were aborted, not destroyed: {failure}") from failure


def abort_groups(world: TrainingWorld, *, timeout: timedelta) -> None:
    """Aborts the training world's NCCL communicators, so that this process can end whatever the others do.

    Not collective. The groups stay known to torch, and are of no use; gloo's need nothing to end.

    Args:
        world: Whose groups.
        timeout: Longest time for it; what is not aborted then is left alone.
    """
    if not dist.is_initialized():
        return
    nccl = [(name, backend) for name, backend in _backends(_groups(world)) if hasattr(backend, "_group_start")]
    failure = end_alone(nccl, timeout) if nccl else None
    if failure is not None:
        logger.warning("teardown: %s", failure)


def _groups(world: TrainingWorld) -> list[dist.ProcessGroup]:
    return [group for group in c10d._world.pg_map if group not in world.host_groups]


def _backends(groups: Sequence[dist.ProcessGroup]) -> list[Named]:
    found: list[Named] = []
    for group in groups:
        if isinstance(group, ReleasableGroup):
            found += [(group.label, backend) for backend in group.close()]
        else:
            name = f"{group.group_desc or group.group_name} {dist.get_process_group_ranks(group)}"
            found += [(name, group._get_backend(device)) for device in group._device_types]
    return found
