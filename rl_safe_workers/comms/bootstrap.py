"""The bootstrap: every communicator connected, for every op class it will carry, while memory is free.

Communicators connect at their first collective, and each op class separately. Left alone, expert data-parallel
groups connect at the first optimizer step, at the memory peak, where no collective timeout applies yet
(ms-swift 9486). So they come first here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, Store

from rl_safe_workers.comms.catalog import EXPERT_DATA_PARALLEL, LiveGroup, OpClass, live_groups, op_classes
from rl_safe_workers.comms.report import BootstrapReport
from rl_safe_workers.errors import CommunicatorError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BootstrapStep:
    """One group and the op classes to connect on it."""

    group: LiveGroup
    classes: tuple[OpClass, ...]


def plan_bootstrap(groups: Sequence[LiveGroup], *, moe_dispatcher: str) -> list[BootstrapStep]:
    """Orders the groups: expert data-parallel first, then as Megatron created them; groups of one rank are left out.

    Every member of a group creates its groups in the same order, so this order agrees between all ranks.
    """
    steps = [
        BootstrapStep(group=g, classes=op_classes(g.description, moe_dispatcher=moe_dispatcher))
        for g in groups
        if g.size > 1
    ]
    return sorted(steps, key=lambda step: step.group.description != EXPERT_DATA_PARALLEL)


def _reduce(group: dist.ProcessGroup, size: int, device: torch.device) -> None:
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def _gather_scatter(group: dist.ProcessGroup, size: int, device: torch.device) -> None:
    full, part = torch.zeros(size, device=device), torch.zeros(1, device=device)
    dist.all_gather_into_tensor(full, part, group=group)
    dist.reduce_scatter_tensor(part, full, group=group)


def _all_to_all(group: dist.ProcessGroup, size: int, device: torch.device) -> None:
    dist.all_to_all_single(torch.zeros(size, device=device), torch.zeros(size, device=device), group=group)


def _p2p(group: dist.ProcessGroup, size: int, device: torch.device) -> None:
    rank, sent, received = dist.get_rank(group), torch.zeros(1, device=device), torch.zeros(1, device=device)
    ops = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    _send_one_by_one(group, size, device)


def _send_one_by_one(group: dist.ProcessGroup, size: int, device: torch.device) -> None:
    """Passes a message down the pipeline and back; each pair of neighbours connects on its own."""
    # At two stages Megatron sends one of the directions over the default group (p2p_communication.py:67).
    backward = dist.group.WORLD if size == 2 else group
    message, rank, ranks = torch.zeros(1, device=device), dist.get_rank(group), dist.get_process_group_ranks(group)
    for stage in range(size - 1):
        if rank == stage:
            dist.send(message, dst=ranks[stage + 1], group=group)
            dist.recv(message, src=ranks[stage + 1], group=backward)
        elif rank == stage + 1:
            dist.recv(message, src=ranks[stage], group=group)
            dist.send(message, dst=ranks[stage], group=backward)


_COLLECTIVES: Mapping[OpClass, Callable[[dist.ProcessGroup, int, torch.device], None]] = {
    OpClass.REDUCE: _reduce,
    OpClass.GATHER_SCATTER: _gather_scatter,
    OpClass.ALL_TO_ALL: _all_to_all,
    OpClass.P2P: _p2p,
}


def _find_difference(
    steps: Sequence[BootstrapStep], store: Store, *, training_rank: int, timeout: timedelta
) -> str | None:
    """Publishes this rank's plan and compares it with that of its next neighbour in every group."""
    plan = {f"{s.group.description}{list(s.group.ranks)}": [str(c) for c in s.classes] for s in steps}
    store.set(f"plan/{training_rank}", json.dumps(plan))
    for key, step in zip(plan, steps, strict=True):
        ranks = step.group.ranks
        neighbour = ranks[(ranks.index(training_rank) + 1) % step.group.size]
        try:
            store.wait([f"plan/{neighbour}"], timeout)
        except DistStoreError:
            return (
                f"training rank {neighbour} published no plan within {timeout.total_seconds():.0f} s; "
                "to wait longer raise rl_safe.timeouts.bootstrap"
            )
        theirs = json.loads(store.get(f"plan/{neighbour}")).get(key)
        if theirs != plan[key]:
            return (
                f"group {key} carries {plan[key]} on training rank {training_rank} "
                f"but {theirs} on rank {neighbour}: their configurations differ"
            )
    return None


def agree_on_plan(
    steps: Sequence[BootstrapStep], store: Store, *, training_rank: int, size: int, timeout: timedelta
) -> None:
    """Makes sure that all plans agree, over the store, before any collective. Collective over: the training world.

    Around each group the comparisons of neighbours close a ring, so equal neighbours mean that all members agree.
    Whoever finds a difference tells all ranks, also those whose own neighbours agree with them.

    Raises:
        CommunicatorError: On every rank, if a rank plans other op classes for a shared group than its neighbour,
            or published no plan in time.
    """
    # Numbered by call: after groups were rebuilt, the plans of the bootstrap before are still in the store.
    call = store.add(f"bootstrap/calls/{training_rank}", 1)
    store = PrefixStore(f"bootstrap/{call}", store)
    difference = _find_difference(steps, store, training_rank=training_rank, timeout=timeout)
    if difference is not None:
        store.set("outcome", difference)
    elif store.add("agreed", 1) == size:
        store.set("outcome", "")
    try:
        # A little longer than the wait for a plan, whose end is what a missing plan is found out by.
        store.wait(["outcome"], timeout + timedelta(seconds=2))
    except DistStoreError:
        raise CommunicatorError(
            f"bootstrap: training rank {training_rank} heard of no agreement within {timeout.total_seconds():.0f} s; "
            "to wait longer raise rl_safe.timeouts.bootstrap"
        ) from None
    outcome = difference or store.get("outcome").decode()
    if outcome:
        raise CommunicatorError(f"bootstrap: {outcome}")


def plan_digest(steps: Sequence[BootstrapStep]) -> str:
    """A short digest of a plan, for logs: equal plans have equal digests."""
    text = json.dumps([[s.group.description, s.group.ranks, s.classes] for s in steps])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def bootstrap_groups(
    store: Store, *, training_rank: int, moe_dispatcher: str, device: torch.device, timeout: timedelta
) -> BootstrapReport:
    """Connects every live communicator of this rank. Collective over: the training world. Idempotent.

    Args:
        store: The run's store.
        training_rank: This process's rank in the training world.
        moe_dispatcher: ``"alltoall"`` or ``"allgather"``; decides whether expert groups carry all_to_all.
        device: Where the one-element tensors live.
        timeout: Longest wait for a neighbour's plan.

    Raises:
        CommunicatorError: On every rank, if the ranks' plans differ; no collective has been entered then.
    """
    start_s, groups = time.monotonic(), live_groups()
    steps = plan_bootstrap(groups, moe_dispatcher=moe_dispatcher)
    agree_on_plan(steps, store, training_rank=training_rank, size=groups[0].size, timeout=timeout)
    for step in steps:
        for op_class in step.classes:
            logger.debug("bootstrap: %s %s on %s", step.group.description, op_class, step.group.ranks)
            _COLLECTIVES[op_class](step.group.group, step.group.size, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    report = BootstrapReport(
        groups=len(steps),
        collectives=sum(len(s.classes) for s in steps),
        skipped_single_rank=len(groups) - len(steps),
        seconds=time.monotonic() - start_s,
    )
    logger.info("bootstrap: %s, plan %s", report, plan_digest(steps))
    return report
