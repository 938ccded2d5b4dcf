"""The training world: the default process group of every rank that holds Megatron state, and of no other rank.

Megatron and torch's checkpoint code use the default group freely (planning, barriers, parameter-group exchange). Their
collectives stay away from rollout ranks only if the default group *is* the training world. There are two modes:

- isolated mode: `init_training_world` creates the default group from trainers alone;
- carved mode: the host's default group already holds rollout ranks, and `carve_training_world` makes the training
  ranks' subgroup the default one before Megatron initialises.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from rl_safe_workers.compat import torch_groups
from rl_safe_workers.control.connection import own_connection
from rl_safe_workers.errors import CommunicatorError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWorld:
    """This process's place in the training world.

    Attributes:
        training_rank: Rank among the trainers, 0 to ``size`` - 1.
        size: Number of trainers.
        joint_ranks: Rank in the host's default group of each training rank; the identity in isolated mode.
        host_group: The host's default group in carved mode, which becomes the default one again after teardown; None in
            isolated mode.
        host_groups: Every group that the host had before the carving.
        host_group_count: torch's counter of groups at that time, from which torch makes the name of the next group.
    """

    training_rank: int
    size: int
    joint_ranks: tuple[int, ...]
    host_group: Any = None
    host_groups: frozenset[Any] = frozenset()
    host_group_count: int = 0


def init_training_world(
    store: Store, *, training_rank: int, size: int, backend: str, timeout: timedelta, options: Any = None
) -> TrainingWorld:
    """Creates the training world as the default group. Collective over: all trainers.

    It does not bind a ``device_id``. With one, the default group connects eagerly, and every later group is a split of
    it. All ranks of the default group must take part in a split (NeMo RL 3189).

    Args:
        store: The run's store. The group's keys have the prefix ``train``. The group uses a connection of its own,
            because NCCL waits in the connection for peers without end and blocks it for all others.
        training_rank: This process's rank.
        size: Number of trainers.
        backend: ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
        timeout: Longest wait of one collective of the default group.
        options: The backend's options, such as ``ProcessGroupNCCL.Options``; None for its defaults.

    Raises:
        CommunicatorError: If the process already has a default group.
    """
    if dist.is_initialized():
        raise CommunicatorError(
            f"this process already has a default group of {dist.get_world_size()} ranks; in a host that creates it, "
            "use carve_training_world"
        )
    own: Store = own_connection(store)
    dist.init_process_group(
        backend,
        store=PrefixStore("train", own),
        rank=training_rank,
        world_size=size,
        timeout=timeout,
        pg_options=options,
    )
    return TrainingWorld(training_rank=training_rank, size=size, joint_ranks=tuple(range(size)))


def carve_training_world(
    training_joint_ranks: Sequence[int], *, timeout: timedelta, options: Any = None
) -> TrainingWorld:
    """Makes the trainers' subgroup the default group of this process, permanently.

    Collective over: the training ranks only. Rollout ranks must not call it. It never waits for them. Call it
    before anything of Megatron is initialised. While the training world lives, create no other counter-named group on
    the host's store, neither on training ranks nor on rollout ranks. torch names groups by a per-process counter, and
    two groups with one name on one store mix their traffic.

    Args:
        training_joint_ranks: Ranks of the trainers in the host's default group, ascending. torch numbers the
            members of a new group in that order, whatever order it is given.
        timeout: Longest wait of one collective of the training world.
        options: The backend's options, such as ``ProcessGroupNCCL.Options``; None for its defaults.

    Raises:
        CommunicatorError: If there is no default group, this process is not among the ranks, the ranks are not
            ascending or do not exist, or the host's group is bound to a device (its subgroups
            would then be splits of it, which need every rank of the parent, rollout ranks included).
    """
    if not dist.is_initialized():
        raise CommunicatorError("there is no default group to carve a training world out of: use init_training_world")
    ranks, host_group = list(training_joint_ranks), dist.group.WORLD
    joint_rank, host_size = dist.get_rank(), dist.get_world_size()
    if ranks != sorted(set(ranks)) or not set(ranks) <= set(range(host_size)):
        raise CommunicatorError(f"training ranks {ranks} must be distinct, ascending ranks of a group of {host_size}")
    if joint_rank not in ranks:
        raise CommunicatorError(f"rank {joint_rank} is not a training rank ({ranks}) and must not carve")
    bound_device = getattr(host_group, "bound_device_id", None)
    if bound_device is not None:
        raise CommunicatorError(
            f"the default group is bound to {bound_device}: every group made from it would be a split "
            "that all of its ranks must join, rollout ranks included; drop device_id from init_process_group"
        )
    host_groups, host_group_count = frozenset(torch_groups.registered_groups()), torch_groups.group_count()
    group = dist.new_group(ranks, timeout=timeout, pg_options=options, use_local_synchronization=True)
    torch_groups.make_default(group)
    # Without its own rank map torch translates the carved group's ranks through the host's, and ShardedTensor
    # fails with "Global rank 0 does not exist in input process group".
    torch_groups.set_members(group, range(len(ranks)))
    training_rank = ranks.index(joint_rank)
    logger.info("carved a training world of %d out of %d ranks; training rank %d", len(ranks), host_size, training_rank)
    return TrainingWorld(
        training_rank=training_rank,
        size=len(ranks),
        joint_ranks=tuple(ranks),
        host_group=host_group,
        host_groups=host_groups,
        host_group_count=host_group_count,
    )


def set_group_timeouts(timeout: timedelta) -> None:
    """Bounds every later collective of the training world's groups. Not collective. Takes microseconds.

    A group keeps the timeout of its creation, and does not inherit that of its parent. Without this call, a collective
    of a one-minute phase could wait as long as the longest phase may take.
    """
    if dist.is_initialized():
        groups = [group for group in torch_groups.megatron_groups() if group is not None]
        for group in [dist.group.WORLD, *groups]:
            torch_groups.set_timeout(group, timeout)


def device_of_world() -> torch.device:
    """Returns the device of the default group's tensors. Not collective.

    If the group has several backends, the one for GPUs counts.
    """
    backends = dict(part.split(":", 1) for part in dist.get_backend_config().split(","))
    if "nccl" in backends.get("cuda", "") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
