"""The comms mixin: bootstrap, the joint group, and weights over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
import torch.distributed as dist

from rl_safe_workers.comms.bootstrap import bootstrap_groups
from rl_safe_workers.comms.report import BootstrapReport
from rl_safe_workers.errors import LifecycleError, WeightSyncError, format_ranks
from rl_safe_workers.lifecycle import REQUIRES, Phase, Role
from rl_safe_workers.models.own_weights import OwnWeight
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec, plan_buckets
from rl_safe_workers.workers.base import MegatronHost, SafeWorker
from rl_safe_workers.workers.outgoing import Outgoing
from rl_safe_workers.worlds.gpu_pair import GpuPair
from rl_safe_workers.worlds.joint_group import JointGroup

_FLUSH_SHARE = 0.8
"""Of the time that is left of a sync; the rest is for the trainers to agree on how it went."""


class SyncHost(MegatronHost, Protocol):
    """What a weight sync needs of the class that the mixin is mixed over."""

    def own_hf_weights(self) -> Sequence[OwnWeight] | None:
        """Lists the HF weights that this rank takes part in making alone; None if the host cannot tell.

        Then `export_hf_weights` gathers them all on training rank 0.
        """
        ...


class CommsMixin(SafeWorker):
    """Connects communicators early and sends weights over the joint group."""

    joint_group: JointGroup | GpuPair | None = None
    _outgoing: Outgoing | None = None
    _buckets: dict[int, list[Bucket]]
    """By ``bucket_bytes``."""

    def bootstrap(self) -> BootstrapReport:
        """Connects every communicator for every op class it will carry. Collective over: the training world."""
        with self.phase(Phase.BOOTSTRAP):
            return bootstrap_groups(
                self.store,
                training_rank=self.training_rank,
                moe_dispatcher=self.megatron.moe_token_dispatcher_type,
                device=self.device,
                timeout=self.remaining(),
            )

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
        with self.lifecycle.enter(Phase.JOINT):
            self.leave()
            self.joint_group = (GpuPair if colocated else JointGroup)(
                self.store,
                joint_rank=self.training_rank,
                size=size,
                generation=generation,
                timeout=self.timeout(Phase.JOINT),
                device=self.device,
                sync_timeout=self.timeout(Phase.SYNC),
            )

    def leave(self) -> None:
        """Leaves the joint group. Not collective; idempotent."""
        group, self.joint_group = self.joint_group, None
        if group is not None:
            group.close()

    def weight_specs(self) -> tuple[WeightSpec, ...]:
        """Describes all HF weights in the order they are sent. Collective over: the training world.

        Call it once the model is built, and again if it is built anew.
        """
        host = cast(SyncHost, self)
        own = host.own_hf_weights()
        if own is None:
            self._outgoing = Outgoing.of_all(host.export_hf_weights)
        else:
            self._outgoing = Outgoing.of_own(own, training_rank=self.training_rank, training_size=self.training_size)
        self._buckets = {}
        return self._outgoing.specs

    def send_weights(self, *, bucket_bytes: int) -> int:
        """Sends all HF weights to the rollout ranks, each from one rank that has it. Collective over: the joint group.

        The trainers then agree on the outcome over the training world: when a rollout rank dies, torch reports the
        failure on some of them only.

        Args:
            bucket_bytes: Bytes per broadcast at most; a larger weight travels alone. Two are in memory at a time.

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
            failure: WeightSyncError | None = None
            if bucket_bytes not in self._buckets:
                self._buckets[bucket_bytes] = plan_buckets(self._outgoing.specs, bucket_bytes=bucket_bytes)
            buckets = self._buckets[bucket_bytes]
            try:
                self._send(buckets, self._outgoing)
            except WeightSyncError as error:
                failure = error
                # Whoever waits for this rank in the joint group hears of it at once.
                self.leave()
            self._agree(failure)
            return sum(bucket.size_bytes for bucket in buckets)

    def _send(self, buckets: list[Bucket], outgoing: Outgoing) -> None:
        weights = outgoing.weights()
        # Making weights may be collective over the training world: whatever fails, go on with it, so that the others
        # can too.
        failure: WeightSyncError | None = None
        if self.joint_group is None:
            failure = WeightSyncError(f"training rank {self.training_rank} has not joined the joint group")
        on_its_way: Callable[[], None] | None = None
        for bucket in buckets:
            buffer = outgoing.pack(bucket, weights, training_rank=self.training_rank, device=self.device)
            if isinstance(self.joint_group, GpuPair) and self.training_size > 1:
                # Each trainer passes everything on to the rollout rank beside it.
                dist.broadcast(buffer, group_src=bucket.source, group=dist.group.WORLD)
            if self.joint_group is None or failure is not None:
                continue
            try:
                started = self.joint_group.broadcast(buffer, source=bucket.source)
                # Only now, so that one bucket is packed while the one before it is sent.
                if on_its_way is not None:
                    on_its_way()
                on_its_way = started
            except WeightSyncError as error:
                failure = error
        for _ in weights:
            raise WeightSyncError("the model has more weights than were announced")
        if failure is not None:
            raise failure
        assert self.joint_group is not None, "else there is a failure"
        if on_its_way is not None:
            on_its_way()
        self.joint_group.flush(_FLUSH_SHARE * self.remaining())

    def _agree(self, failure: WeightSyncError | None) -> None:
        flags = torch.zeros(self.training_size, dtype=torch.int32, device=self.device)
        mine = torch.tensor([int(failure is not None)], dtype=torch.int32, device=self.device)
        dist.all_gather_into_tensor(flags, mine, group=dist.group.WORLD)
        failed = [rank for rank, flag in enumerate(flags.tolist()) if flag]
        if failed:
            raise WeightSyncError(
                f"weight sync failed on training rank {format_ranks(failed)}"
                + (f": {failure}" if failure else "; the rollout's weights are not usable")
            ) from failure
