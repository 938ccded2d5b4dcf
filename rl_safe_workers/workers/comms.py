"""The comms mixin: bootstrap, the joint group, and weights over it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from rl_safe_workers.comms.bootstrap import bootstrap_groups
from rl_safe_workers.comms.report import BootstrapReport
from rl_safe_workers.errors import LifecycleError, WeightSyncError, format_ranks
from rl_safe_workers.lifecycle import REQUIRES, Phase, Role
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec, plan_buckets
from rl_safe_workers.workers.base import MegatronHost, SafeWorker
from rl_safe_workers.worlds.gpu_pair import GpuPair
from rl_safe_workers.worlds.joint_group import JointGroup


def dtype_name(tensor: torch.Tensor) -> str:
    """Torch's name of a tensor's dtype without the prefix, e.g. ``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")


_FLUSH_SHARE = 0.8
"""Of the time that is left of a sync; the rest is for the trainers to agree on how it went."""


class CommsMixin(SafeWorker):
    """Connects communicators early and sends weights over the joint group."""

    joint_group: JointGroup | GpuPair | None = None

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

    def weight_specs(self: MegatronHost) -> list[WeightSpec]:
        """Describes all HF weights in the order they are sent. Collective over: the training world."""
        return [
            WeightSpec(name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape))
            for name, tensor in self.export_hf_weights()
        ]

    def send_weights(self, specs: list[WeightSpec], *, bucket_bytes: int) -> int:
        """Sends all HF weights to the rollout ranks, from training rank 0. Collective over: the joint group.

        The trainers then agree on the outcome over the training world: when a rollout rank dies, torch reports the
        failure on some of them only.

        Args:
            specs: What `weight_specs` returned.
            bucket_bytes: Bytes per broadcast at most; a larger weight travels alone.

        Returns:
            Bytes sent.

        Raises:
            WeightSyncError: On every trainer, if it failed on any. The joint group is of no more use then: join its
                next generation.
        """
        with self.phase(Phase.SYNC):
            failure: WeightSyncError | None = None
            buckets = plan_buckets(specs, bucket_bytes=bucket_bytes)
            try:
                self._broadcast_buckets(buckets)
            except WeightSyncError as error:
                failure = error
            self._agree(failure)
            return sum(bucket.size_bytes for bucket in buckets)

    def _broadcast_buckets(self, buckets: list[Bucket]) -> None:
        weights = self.export_hf_weights()  # type: ignore[attr-defined]
        # The export is collective over the training world: whatever fails, go on with it, so that the others can too.
        failure: WeightSyncError | None = None
        if self.joint_group is None:
            failure = WeightSyncError(f"training rank {self.training_rank} has not joined the joint group")
        for bucket in buckets:
            buffer = self._pack(bucket, weights)
            if self.joint_group is not None and failure is None:
                try:
                    self.joint_group.broadcast([buffer], source=0)
                except WeightSyncError as error:
                    failure = error
        for _ in weights:
            raise WeightSyncError("the model has more weights than were announced")
        if failure is not None:
            raise failure
        assert self.joint_group is not None, "else there is a failure"
        self.joint_group.flush(_FLUSH_SHARE * self.remaining())

    def _pack(self, bucket: Bucket, weights: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
        """Takes a bucket's weights and copies them side by side."""
        buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8, device=self.device)
        places, tensors = [], []
        for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
            name, tensor = next(weights)
            if (name, tuple(tensor.shape), dtype_name(tensor)) != (spec.name, spec.shape, spec.dtype):
                raise WeightSyncError(
                    f"weight {name} {dtype_name(tensor)} {tuple(tensor.shape)} was announced as "
                    f"{spec.name} {spec.dtype} {spec.shape}"
                )
            places.append(buffer[offset : offset + spec.size_bytes].view(tensor.dtype).view(tensor.shape))
            tensors.append(tensor.detach())
        # One launch for all; a copy_ for each expert costs more than the transfer.
        torch._foreach_copy_(places, tensors)
        return buffer

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
