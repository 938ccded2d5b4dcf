"""The bootstrap: connects every communicator for every op class that it will carry, while memory is free.

Without it, a communicator connects at its first collective, for each op class separately. Expert data-parallel groups
would connect at the first optimizer step, at the memory peak, where no collective timeout applies yet (ms-swift 9486).
So the bootstrap connects these groups first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rl_safe_workers.comms.hosts import NO_HOSTS, Hosts, hosts_of_ranks
from rl_safe_workers.comms.kernels import loaded_kernels
from rl_safe_workers.comms.live_groups import LiveGroup, live_groups
from rl_safe_workers.comms.report import BootstrapReport, LedgerEntry
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.control.supervision import Supervision
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.topology.groups import KINDS, PIPELINE, WORLD, Classes, Features, OpClass, connected_classes
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.topology.memory import costs, links_of, over_world_bytes

logger = logging.getLogger(__name__)

Probe = Callable[[], int]
"""Returns the bytes of device memory outside torch's allocator."""
HostGroups = Sequence[tuple[Any, str, Classes]]
"""Megatron's groups, each with its key in ``nccl_communicator_config_path`` and a host's op classes on it."""


@dataclass(frozen=True, kw_only=True)
class BootstrapStep:
    """One group and the op classes to connect on it."""

    group: LiveGroup
    classes: Classes
    max_ctas: int | None
    """The group's limit in CTAs; None for NCCL's default."""


def plan_bootstrap(
    groups: Sequence[LiveGroup], layout: ParallelLayout, features: Features, limits: Mapping[str, int]
) -> list[BootstrapStep]:
    """Returns a step for each group that carries something: expert data-parallel first, then in order of creation.

    All members of a group create their groups in the same order, so the order of steps agrees between ranks. A Megatron
    group that is not in the table of groups is connected for reductions.
    """
    steps = []
    for group in groups:
        kind = group.kind
        if kind is not None:
            classes = connected_classes(kind, group.size, layout, features)
            steps.append(BootstrapStep(group=group, classes=classes, max_ctas=limits.get(kind.key)))
        elif group.is_megatrons and not group.is_known and group.size > 1:
            steps.append(BootstrapStep(group=group, classes=(OpClass.REDUCE,), max_ctas=None))
    return sorted((step for step in steps if step.classes), key=lambda step: not _is_expert_data_parallel(step.group))


def _is_expert_data_parallel(group: LiveGroup) -> bool:
    return "EXPERT_DATA_PARALLEL" in group.description


def _reduce(group: dist.ProcessGroup, size: int, device: torch.device, *, ring: bool) -> None:
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def _gather_scatter(group: dist.ProcessGroup, size: int, device: torch.device, *, ring: bool) -> None:
    full, part = torch.zeros(size, device=device), torch.zeros(1, device=device)
    dist.all_gather_into_tensor(full, part, group=group)
    dist.reduce_scatter_tensor(part, full, group=group)


def _all_to_all(group: dist.ProcessGroup, size: int, device: torch.device, *, ring: bool) -> None:
    dist.all_to_all_single(torch.zeros(size, device=device), torch.zeros(size, device=device), group=group)


def _root_exchange(group: dist.ProcessGroup, size: int, device: torch.device, *, ring: bool) -> None:
    mine, root = torch.zeros(1, device=device), dist.get_global_rank(group, 0)
    parts = [torch.zeros(1, device=device) for _ in range(size)] if dist.get_rank(group) == 0 else None
    dist.gather(mine, parts, dst=root, group=group)
    dist.scatter(mine, parts, src=root, group=group)


def _batched_p2p(group: dist.ProcessGroup, size: int, device: torch.device, *, ring: bool) -> None:
    rank, sent, received = dist.get_rank(group), torch.zeros(1, device=device), torch.zeros(1, device=device)
    # Both directions: a stage sends activations to the next stage and gradients to the previous one.
    for step in (1, -1):
        ops = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + step) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - step) % size),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def _batched_p2p_over_world(group: dist.ProcessGroup, size: int, device: torch.device, *, ring: bool) -> None:
    """Sends batches between the members of a pipeline group: over the default group, then over the pipeline group."""
    ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    for step in (1, -1):
        ops = [
            dist.P2POp(dist.isend, torch.zeros(1, device=device), ranks[(own + step) % size]),
            dist.P2POp(dist.irecv, torch.zeros(1, device=device), ranks[(own - step) % size]),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    _batched_p2p(group, size, device, ring=ring)


def _unbatched_p2p(group: dist.ProcessGroup, size: int, device: torch.device, *, ring: bool) -> None:
    """Passes a message down the pipeline and back. Each pair of neighbours connects separately in each direction."""
    # With two stages, Megatron sends backward messages over the default group (p2p_communication.py:67).
    backward = dist.group.WORLD if size == 2 else group
    message, rank, ranks = torch.zeros(1, device=device), dist.get_rank(group), dist.get_process_group_ranks(group)
    for stage in range(size if ring else size - 1):
        sender, receiver = stage, (stage + 1) % size
        if rank == sender:
            dist.send(message, dst=ranks[receiver], group=group)
            dist.recv(message, src=ranks[receiver], group=backward)
        elif rank == receiver:
            dist.recv(message, src=ranks[sender], group=group)
            dist.send(message, dst=ranks[sender], group=backward)


_COLLECTIVES: Mapping[OpClass, Callable[..., None]] = {
    OpClass.REDUCE: _reduce,
    OpClass.GATHER_SCATTER: _gather_scatter,
    OpClass.ALL_TO_ALL: _all_to_all,
    OpClass.ROOT_EXCHANGE: _root_exchange,
    OpClass.BATCHED_P2P: _batched_p2p,
    OpClass.UNBATCHED_P2P: _unbatched_p2p,
}


def plan_digest(steps: Sequence[BootstrapStep]) -> str:
    """A short digest of a plan, for logs: equal plans have equal digests."""
    text = json.dumps([[str(s.group), s.classes, s.max_ctas] for s in steps])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _connected(steps: Sequence[BootstrapStep], features: Features) -> dict[str, frozenset[OpClass]]:
    found = {step.group.group.group_name: frozenset(step.classes) for step in steps}
    world: set[OpClass] = set()
    for step in (step for step in steps if step.group.description == PIPELINE):
        if step.group.size == 2 and OpClass.UNBATCHED_P2P in step.classes:
            world.add(OpClass.UNBATCHED_P2P)  # one direction uses the default group
        if features.p2p_over_world and OpClass.BATCHED_P2P in step.classes:
            world.add(OpClass.BATCHED_P2P)
    if world:
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        found[name] = found.get(name, frozenset()) | world
    return found


class Bootstrap:
    """Connects the communicators of one training rank, initially and after every rebuild.

    Attributes:
        connected: The op classes that each group was connected for, by torch's name of the group.
    """

    def __init__(
        self,
        control: ControlPlane,
        *,
        layout: ParallelLayout,
        features: Features,
        limits: Mapping[str, int],
        device: torch.device,
        probe: Probe | None = None,
    ) -> None:
        """Stores the arguments.

        Args:
            control: This rank's place in the training world.
            layout: Sizes of the training world's axes.
            features: Features of the run that decide which collectives the groups carry.
            limits: CTAs by key, as `topology.budget.plan_limits` returned them.
            device: Device of the one-element tensors that the bootstrap sends.
            probe: Returns the device memory outside torch's allocator; None if there is no device to ask.
        """
        self._control, self._layout, self._features = control, layout, features
        self._limits, self._device, self._probe = limits, device, probe
        self._hosts: Hosts = NO_HOSTS
        self.connected: dict[str, frozenset[OpClass]] = {}

    def run(
        self, *, timeout: timedelta, elsewhere: Collection[Any] = (), phase: Phase = Phase.BOOTSTRAP
    ) -> BootstrapReport:
        """Connects every live communicator of this rank. Collective over: the training world. Idempotent.

        Args:
            timeout: Longest time for all of it.
            elsewhere: Groups of the process that do not belong to the training world.
            phase: The phase to which the timeout belongs, for errors.

        Raises:
            CommunicatorError: On every rank, before any collective, if the ranks' plans differ. Also if a rank fails in
                a collective; the message names it.
            PhaseTimeoutError: On every rank, if a rank does not reach a group in time; names group and rank.
        """
        started_s = time.monotonic()
        # This comes before anything that can fail, because every rank must count this bootstrap. The store may still
        # hold the keys of an earlier one.
        work = Supervision(self._control, "bootstrap", phase=phase, timeout=timeout)
        groups, steps = work.alone("the plan of the bootstrap", lambda: self._plan(elsewhere))
        unknown = tuple(str(group) for group in groups if not group.is_known)
        work.compare("plan", {str(s.group): [*s.classes, s.max_ctas] for s in steps}, [s.group.ranks for s in steps])
        if self._probe is not None:
            self._hosts = hosts_of_ranks(self._control, phase=phase, timeout=timeout)
        with (
            nullcontext()
            if self._probe is None
            else loaded_kernels(
                self._device, self._probe, timeout=timeout, supervised=partial(work.alone, "NCCL's kernels")
            ) as kernels
        ):
            entries = [entry for step in steps for entry in self._connect(step, work)]
            work.finish()
        self.connected = _connected(steps, self._features)
        report = BootstrapReport(
            entries=tuple(entries),
            skipped=len(groups) - len(steps),
            unknown=unknown,
            seconds=time.monotonic() - started_s,
            kernel_bytes=None if kernels is None else kernels.bytes,
            kernel_seconds=0.0 if kernels is None else kernels.seconds,
        )
        self._log(report, plan_digest(steps))
        return report

    def run_host(
        self, wanted: HostGroups, *, timeout: timedelta, phase: Phase = Phase.BOOTSTRAP
    ) -> tuple[tuple[LedgerEntry, ...], Mapping[str, frozenset[OpClass]]]:
        """Connects what a host itself issues on Megatron's groups, after `run`. Collective over: the training world.

        A host also issues collectives on groups of one rank. One reduction creates the communicator of such a group.

        Args:
            wanted: Groups and their op classes, in the same order on every rank.
            timeout: Longest time for all of it.
            phase: The phase to which the timeout belongs, for errors.

        Returns:
            The cost of each op class on this rank, and the op classes by torch's name of the group.

        Raises:
            CommunicatorError: As `run`.
            PhaseTimeoutError: As `run`.
        """
        live = list(live_groups())
        steps = [
            BootstrapStep(
                group=group,
                classes=classes if group.size > 1 else (OpClass.REDUCE,),
                max_ctas=self._limits.get(key),
            )
            for mine, key, classes in wanted
            for group in live
            if group.group is mine
        ]
        work = Supervision(self._control, "host_bootstrap", phase=phase, timeout=timeout)
        work.compare("plan", {str(step.group): list(step.classes) for step in steps}, [s.group.ranks for s in steps])
        entries = tuple(entry for step in steps for entry in self._connect(step, work))
        work.finish()
        return entries, {step.group.group.group_name: frozenset(step.classes) for step in steps}

    def _plan(self, elsewhere: Collection[Any]) -> tuple[Sequence[LiveGroup], list[BootstrapStep]]:
        groups = live_groups(elsewhere=elsewhere)
        return groups, plan_bootstrap(groups, self._layout, self._features, self._limits)

    def _connect(self, step: BootstrapStep, work: Supervision) -> Iterator[LedgerEntry]:
        group = step.group
        links = links_of(group.description, group.size, self._features)
        near = self._hosts.near(self._control.rank, group.ranks)
        predicted = costs(step.classes, size=group.size, max_ctas=step.max_ctas, links=links, near=near)
        had = self.connected.get(group.group.group_name, frozenset())
        for op_class, own_bytes in zip(step.classes, predicted, strict=True):
            predicted_bytes = 0 if op_class in had else own_bytes
            if self._sends_over_world(op_class, group):
                predicted_bytes += over_world_bytes(group.size, self._limits.get(KINDS[WORLD].key))
            logger.debug("bootstrap: %s on %s", op_class, group)
            seconds, taken = work.part(f"{group} {op_class}", group.ranks, partial(self._issue, op_class, group))
            yield LedgerEntry(
                group=group.description,
                ranks=group.ranks,
                op_class=op_class,
                seconds=seconds,
                bytes=taken,
                predicted_bytes=0 if self._probe is None else predicted_bytes,
            )

    def _sends_over_world(self, op_class: OpClass, group: LiveGroup) -> bool:
        is_pipeline = group.description == PIPELINE and group.size > 1
        return self._features.p2p_over_world and is_pipeline and op_class is OpClass.BATCHED_P2P

    def _issue(self, op_class: OpClass, group: LiveGroup) -> tuple[float, int | None]:
        """Issues a class's collective; returns its seconds and the device memory that it took. Runs in a thread."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        before = None if self._probe is None else self._probe()
        started_s = time.monotonic()
        # Context-parallel ranks pass blocks around a ring, and the last virtual stage sends to the first.
        ring = group.description != PIPELINE or self._features.virtual_pipeline
        issue = _COLLECTIVES[op_class]
        if self._sends_over_world(op_class, group):
            issue = _batched_p2p_over_world
        issue(group.group, group.size, self._device, ring=ring)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.monotonic() - started_s
        return seconds, None if self._probe is None or before is None else self._probe() - before

    def _log(self, report: BootstrapReport, digest: str) -> None:
        logger.info(
            "bootstrap: %d groups, %d op classes in %.2f s, %s of device memory (%.0f MiB predicted), plan %s",
            report.groups,
            len(report.entries),
            report.seconds,
            "no count" if report.bytes is None else f"{report.bytes / 2**20:.0f} MiB",
            report.predicted_bytes / 2**20,
            digest,
        )
        if report.unknown:
            logger.warning("bootstrap: the table of groups lacks %s", ", ".join(report.unknown))
