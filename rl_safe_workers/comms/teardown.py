"""Ends the training world: verdicts first, then every group destroyed in one order, or none."""

from __future__ import annotations

import logging
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.worlds.training_world import TrainingWorld

logger = logging.getLogger(__name__)


def exchange_verdicts(
    store: Store, *, training_rank: int, size: int, failure: str | None, timeout: timedelta
) -> dict[int, str]:
    """Tells the others whether this rank is well, and learns who is not. Over the store; no collective.

    Args:
        store: The run's store.
        training_rank: This process's rank.
        size: Number of trainers.
        failure: None if all is well, else one line of what failed.
        timeout: Longest wait for all verdicts.

    Returns:
        Failure by training rank; empty if every rank is well. A rank that gave no verdict in time counts as failed,
        and so does rank 0 if its store is gone.
    """
    try:
        return _exchange(PrefixStore("verdict", store), training_rank, size, failure, timeout)
    except DistNetworkError:
        return {0: "has ended, and the run's store with it"}


def _exchange(store: Store, training_rank: int, size: int, failure: str | None, timeout: timedelta) -> dict[int, str]:
    store.set(str(training_rank), failure or "")
    if failure:
        store.add("failures", 1)
    if store.add("verdicts", 1) == size:
        store.set("complete", "1")
    try:
        store.wait(["complete"], timeout)
    except DistStoreError:
        logger.warning("teardown: not every trainer gave a verdict within %.0f s", timeout.total_seconds())
    else:
        # The common case costs each rank a few requests, however many ranks there are.
        if store.add("failures", 0) == 0:
            return {}
    keys = [str(rank) for rank in range(size)]
    verdicts = {int(k): store.get(k).decode() if store.check([k]) else "gave no verdict" for k in keys}
    return {rank: verdict for rank, verdict in verdicts.items() if verdict}


def destroy_groups(world: TrainingWorld) -> None:
    """Destroys the training world's groups and clears Megatron's globals. Collective over: the training world.

    In isolated mode that is every group of the process, in one call: destroying them one by one in the order of their
    creation deadlocks where members hold different subsets, such as embedding groups at four pipeline stages. In carved
    mode the host's groups stay, and its default group is the default one again; ours go in the order that torch uses
    for all of them, by name, last first. Idempotent.
    """
    parallel_state.destroy_model_parallel()
    if not dist.is_initialized():
        return
    if world.host_group is None:
        dist.destroy_process_group()
        return
    c10d._update_default_pg(world.host_group)
    ours = [group for group in c10d._world.pg_map if group not in world.host_groups]
    for group in sorted(ours, key=lambda group: c10d._world.pg_names[group], reverse=True):
        dist.destroy_process_group(group)
    # The next group of the host gets the name that it has on the rollout ranks, which created none of ours.
    c10d._world.group_count = world.host_group_count
