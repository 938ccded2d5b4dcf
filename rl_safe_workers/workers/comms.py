"""The comms mixin: bootstrap, the joint group, and weights over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import MappingProxyType
from typing import cast

import torch
import torch.distributed as dist

from rl_safe_workers.comms.bootstrap import Bootstrap
from rl_safe_workers.comms.catalog import LiveGroup
from rl_safe_workers.comms.late import LateWatch
from rl_safe_workers.comms.report import BootstrapReport, LateAllocation
from rl_safe_workers.errors import Failure, LifecycleError, WeightSyncError, first_line, foreign_cause
from rl_safe_workers.lifecycle import REQUIRES, Phase
from rl_safe_workers.models.own_weights import OwnWeight
from rl_safe_workers.platforms.device_memory import outside_torch
from rl_safe_workers.ranks import Role, format_ranks, joint_ids, trainer_id
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec, plan_buckets
from rl_safe_workers.topology.groups import OpClass
from rl_safe_workers.workers.base import MegatronHost
from rl_safe_workers.workers.groups import GroupsMixin
from rl_safe_workers.workers.outgoing import Outgoing, Weights
from rl_safe_workers.worlds.gpu_pair import GpuPair
from rl_safe_workers.worlds.joint_group import JointGroup, joint_world

_WATCHED = (Phase.LOGPROB, Phase.TRAIN)
_PAIR_SHARE, _FLUSH_SHARE = 0.5, 0.8
"""Of the time that is left of a sync, for rollout ranks that do not read: before the other trainers, who wait in the
world's broadcasts meanwhile, give up; the rest is to agree on how it went."""


class CommsMixin(GroupsMixin):
    """Connects communicators early and sends weights over the joint group."""

    joint_group: JointGroup | GpuPair | None = None
    _colocated = False
    _late: LateWatch | None = None
    _connected: Mapping[str, frozenset[OpClass]] = MappingProxyType({})
    """Op classes by torch's name of the group."""
    _watched: Counter[Phase]
    _outgoing: Outgoing | None = None
    _buckets: dict[int, list[Bucket]]
    """By ``bucket_bytes``."""

    def bootstrap(self) -> BootstrapReport:
        """Connects every communicator for every op class it will carry. Collective over: the training world.

        Idempotent; call it again after groups were built anew.

        Returns:
            What each op class of each group has cost this rank.

        Raises:
            CommunicatorError: On every rank, if plans differ or a rank fails; names it.
            PhaseTimeoutError: On every rank, if one does not come to a group within ``rl_safe.timeouts.bootstrap``.
        """
        with self.phase(Phase.BOOTSTRAP):
            probe = outside_torch(self.device)
            report, self._connected = self._connect_groups(probe)
            self._watched = Counter()
            self._late = LateWatch(self._connected, probe=probe)
            return report

    def is_connected(self, group: LiveGroup) -> bool:
        """Whether the bootstrap has connected a group."""
        return group.group.group_name in self._connected

    def _connect_groups(
        self, probe: Callable[[], int] | None, *, phase: Phase = Phase.BOOTSTRAP, timeout: timedelta | None = None
    ) -> tuple[BootstrapReport, Mapping[str, frozenset[OpClass]]]:
        """Connects every group; also after they were released. Collective over: the training world.

        Args:
            probe: Tells the device memory that is not torch's.
            phase: The phase that this is part of, for errors.
            timeout: Longest time for it; None: what is left of the phase.
        """
        plan = self.plan_comms()
        bootstrap = Bootstrap(
            self.control,
            layout=plan.layout,
            features=plan.features,
            limits=plan.limits if probe is not None else {},
            device=self.device,
            probe=probe,
        )
        report = bootstrap.run(timeout=timeout or self.remaining(), elsewhere=self.world.host_groups, phase=phase)
        return report, bootstrap.connected

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """As `SafeWorker.phase`; in the first training steps it also looks for memory that collectives take late.

        Raises:
            CommunicatorError: If one does, and ``rl_safe.bootstrap.on_late`` is ``raise``.
        """
        with super().phase(phase):
            watch, wanted = self._late, self.rl_safe.bootstrap.watch_steps
            if watch is None or phase not in _WATCHED or self._watched[phase] >= wanted:
                yield
                return
            self._watched[phase] += 1
            with watch.watching(phase) as found:
                yield
            watch.report(
                found, who=f"training rank {self.training_rank}", refuse=self.rl_safe.bootstrap.on_late == "raise"
            )

    def late_allocations(self) -> list[LateAllocation]:
        """What the bootstrap has missed, as the first training steps showed. Not collective."""
        return [] if self._late is None else list(self._late.found)

    def check_phase(self, phase: Phase) -> None:
        """Holds every phase that needs connected communicators back until the bootstrap has run.

        Raises:
            LifecycleError: If it has not, and ``rl_safe.bootstrap.on_missing`` does not say to run it now.
        """
        super().check_phase(phase)
        needs_bootstrap = Phase.BOOTSTRAP in REQUIRES[Role.TRAINER].get(phase, ())
        if not needs_bootstrap or self.lifecycle.has_completed(Phase.BOOTSTRAP):
            return
        if self.rl_safe.bootstrap.on_missing == "bootstrap":
            self.bootstrap()
            return
        raise LifecycleError(
            f"phase {phase} on training rank {self.training_rank}: the bootstrap has not run, so communicators would "
            "connect later, when memory is full; call bootstrap() after init_groups(), "
            "or set rl_safe.bootstrap.on_missing=bootstrap"
        )

    def join(self, size: int, *, generation: int = 0, colocated: bool = False) -> None:
        """Joins the joint group as joint rank = training rank. Collective over: trainers and rollout ranks.

        Args:
            size: Number of trainers and rollout ranks.
            generation: Counts rebuilds of the group.
            colocated: Whether each trainer shares its GPU with a rollout rank, to which alone it sends then.

        Raises:
            PhaseTimeoutError: If some joint rank does not arrive in time; names it.
            WeightSyncError: If the group cannot be connected.
        """
        self.check_phase(Phase.JOINT)
        with self.lifecycle.enter(Phase.JOINT), self._door.opened() if self._door else nullcontext():
            self.leave()
            self._colocated = colocated
            self.joint_group = (GpuPair if colocated else JointGroup)(
                self.control.of_world(
                    joint_world(generation),
                    rank=self.training_rank,
                    members=joint_ids(trainers=self.training_size, size=size),
                ),
                generation=generation,
                timeout=self.timeout(Phase.JOINT),
                device=self.device,
                sync_timeout=self.timeout(Phase.SYNC),
            )

    def leave(self, *, failed: bool = False) -> None:
        """Leaves the joint group. Not collective; idempotent.

        Args:
            failed: Whether something in it may never end; it is given up then, without waiting.
        """
        group, self.joint_group = self.joint_group, None
        if group is not None:
            (group.abort if failed else group.close)()

    def weight_specs(self) -> tuple[WeightSpec, ...]:
        """Describes all HF weights in the order they are sent. Collective over: the training world.

        Call it once the model is built, and again if it is built anew. A host that has ``own_hf_weights``, as
        `MegatronPolicy` does, sends each weight from a rank that holds it; of any other, ``export_hf_weights`` brings
        them all to training rank 0.
        """
        own: Sequence[OwnWeight] | None = getattr(self, "own_hf_weights", lambda: None)()
        if own is None:
            self._outgoing = Outgoing.of_all(cast(MegatronHost, self).export_hf_weights)
        else:
            self._outgoing = Outgoing.of_own(own, training_rank=self.training_rank)
        self._buckets = {}
        return self._outgoing.specs

    def send_weights(self, *, bucket_bytes: int) -> int:
        """Sends all HF weights to the rollout ranks, each from one rank that has it. Collective over: the joint group.

        The trainers then agree on the outcome over the training world: when a rollout rank dies, torch reports the
        failure on some of them only.

        Args:
            bucket_bytes: Bytes per broadcast at most; a larger weight travels alone. Two are in memory at a time, and
                some 64 MiB of weights that tensor parallelism splits.

        Returns:
            Bytes sent.

        Raises:
            LifecycleError: If `weight_specs` has not been called.
            WeightSyncError: On every trainer, if it failed on any. The joint group is of no more use then: join its
                next generation.
        """
        if self._outgoing is None:
            raise LifecycleError(f"training rank {self.training_rank}: call weight_specs() before send_weights()")
        with self.phase(Phase.SYNC):
            if bucket_bytes not in self._buckets:
                self._buckets[bucket_bytes] = plan_buckets(self._outgoing.specs, bucket_bytes=bucket_bytes)
            buckets = self._buckets[bucket_bytes]
            failure, buffers = self._bucket_buffers(max((bucket.size_bytes for bucket in buckets), default=0))
            if self._colocated or self._outgoing.is_collective:
                # Collectives of the training world follow, which a rank without room would leave the others in.
                self._agree(failure)
            failure = self._send(buckets, self._outgoing, buffers, failure)
            self._agree(failure)
            return sum(bucket.size_bytes for bucket in buckets)

    def _bucket_buffers(self, size_bytes: int) -> tuple[Failure | None, list[torch.Tensor]]:
        """Returns room for two buckets, or why there is none."""
        try:
            return None, [torch.empty(size_bytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        except RuntimeError as error:
            text = f"there is no room for two buckets of {size_bytes} bytes: {first_line(error)}"
            return Failure(text, foreign_cause(error)), []

    def _send(
        self, buckets: list[Bucket], outgoing: Outgoing, buffers: list[torch.Tensor], failure: Failure | None
    ) -> Failure | None:
        """Sends all buckets; returns what has failed. Goes on to the end for the sake of the others' collectives."""
        group = self.joint_group
        if failure is None and group is None:
            failure = Failure("has not joined the joint group")
        if failure is not None:
            # Whoever waits for this rank in the joint group hears of it at once.
            self.leave(failed=True)
        elif group is not None:
            group.limit(_PAIR_SHARE * self.remaining())
        weights = outgoing.weights()
        on_its_way: Callable[[], None] | None = None
        for number, bucket in enumerate(buckets):
            # Without room there is nothing to pack, and an agreement before this where others need its weights.
            buffer = buffers[number % len(buffers)][: bucket.size_bytes] if buffers else None
            if buffer is None:
                break
            failed_now = self._pack(bucket, weights, buffer, outgoing)
            if self._colocated and self.training_size > 1:
                # Each trainer passes everything on to the rollout rank beside it.
                dist.broadcast(buffer, group_src=bucket.source, group=dist.group.WORLD)
            if failure is None and failed_now is None and group is not None:
                try:
                    started = group.broadcast(buffer, source=bucket.source)
                    # Only now, so that one bucket is packed while the one before it is sent.
                    if on_its_way is not None:
                        on_its_way()
                    on_its_way = started
                except WeightSyncError as error:
                    failed_now = Failure.of(error)
            if failure is None and failed_now is not None:
                failure, on_its_way = failed_now, None
                self.leave(failed=True)
        if failure is None and next(weights, None) is not None:
            failure = Failure("the model has more weights than were announced")
        if failure is None and group is not None:
            failure = self._flush(group, on_its_way)
        return failure

    def _pack(self, bucket: Bucket, weights: Weights, buffer: torch.Tensor, outgoing: Outgoing) -> Failure | None:
        try:
            outgoing.pack(bucket, weights, buffer, training_rank=self.training_rank)
        except Exception as error:
            return Failure.of(error)
        return None

    def _flush(self, group: JointGroup | GpuPair, on_its_way: Callable[[], None] | None) -> Failure | None:
        try:
            if on_its_way is not None:
                on_its_way()
            group.flush(_FLUSH_SHARE * self.remaining())
        except WeightSyncError as error:
            return Failure.of(error)
        return None

    def _agree(self, failure: Failure | None) -> None:
        """Raises on every trainer if one has failed. Over the store: the world's own groups may be what has failed."""
        failed = self.failed_ranks(Phase.SYNC, failure)
        if failed:
            self.leave(failed=True)
            # A rank that has failed itself says so.
            culprit = self.training_rank if self.training_rank in failed else min(failed)
            text, foreign = failed[culprit]
            raise WeightSyncError(
                f"weight sync failed on training rank {format_ranks(failed)}: {text}",
                culprit=trainer_id(culprit),
                foreign=foreign,
            )
