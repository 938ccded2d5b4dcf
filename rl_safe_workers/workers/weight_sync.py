"""Sends weights from the trainers to the rollout ranks, over the joint group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from rl_safe_workers.compat.param_gathers import complete_param_gathers
from rl_safe_workers.control.failure import Failure
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import LifecycleError, WeightSyncError, first_line, foreign_cause
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.models.own_weights import OwnWeight
from rl_safe_workers.ranks import format_ranks, joint_ids, trainer_id
from rl_safe_workers.rollout.cuts import ONLY_RANK, BucketPart, EngineRank, plan_parts
from rl_safe_workers.rollout.packing import Adjacent, adjacent_in
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec
from rl_safe_workers.rollout.sent_digests import SentDigests
from rl_safe_workers.rollout.sync_proof import SentWeights
from rl_safe_workers.workers.outgoing import Items, Outgoing
from rl_safe_workers.workers.world_entry import WorldEntry
from rl_safe_workers.worlds.gpu_pair import GpuPair
from rl_safe_workers.worlds.joint_group import JointGroup, forget_joint_groups, joint_world, two_buffers
from rl_safe_workers.worlds.training_rank import Part, TrainingRank

_NOT_PROVED = SentWeights(digests={}, seconds=0.0)
_SEND_SHARE, _SEND_SHARE_OF_PAIR, _FLUSH_SHARE = 0.8, 0.5, 0.8
"""Shares of a sync's remaining time. The sends get the first share, or the second if colocated. The flush gets the
third share of the time left then. So the waits end before the other trainers time out in the world's broadcasts. The
rest is for the agreement."""


@runtime_checkable
class OwnWeightsHost(Protocol):
    """A host that can tell which weights each rank has. For other hosts, rank 0 sends all weights."""

    def own_hf_weights(self) -> Sequence[OwnWeight] | None:
        """Lists the HF weights that this rank makes, alone or with its tensor-parallel peers.

        Returns None if the host cannot tell which weights each rank has. Collective over: the training world.
        """
        ...


class WeightSync(Part):
    """Joins the joint group and sends weights over it.

    Attributes:
        joint_group: The group of trainers and rollout ranks; None before `join` and after `leave`.
        sent: Digests of the weights that this rank sent last; empty if that sync took no digests.
    """

    def __init__(self, rank: TrainingRank, entry: WorldEntry) -> None:
        super().__init__(rank)
        self._entry = entry
        self.joint_group: JointGroup | GpuPair | None = None
        self.sent = _NOT_PROVED
        self._digests: SentDigests | None = None
        """Digests of the current sync; None if it takes no digests."""
        self._colocated = False
        self._on_its_way = deque[Callable[[], None]]()
        """Functions that wait for the broadcasts under way, the oldest first."""
        self._side_streams: dict[str, torch.cuda.Stream] = {}
        """Streams for work beside the packing, by what they do; see `_beside_packing`."""
        self._outgoing: Outgoing | None = None
        self._engine: Sequence[EngineRank] = (ONLY_RANK,)
        """The ranks of each engine."""
        self._buckets: dict[int, tuple[list[tuple[Bucket, Sequence[BucketPart]]], Adjacent]] = {}
        """Buckets with the parts of an engine's ranks, and their `adjacent_in`, by ``bucket_bytes``."""

    def join(
        self,
        size: int,
        *,
        generation: int = 0,
        colocated: bool = False,
        rollout_ranks: Sequence[int] | None = None,
        engine: Sequence[EngineRank] = (ONLY_RANK,),
        control: ControlPlane | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Joins the joint group. A trainer's joint rank is its training rank.

        Collective over: trainers and rollout ranks.

        Args:
            size: Number of trainers and rollout ranks.
            generation: Number of rebuilds so far. Above 0, the previous group is aborted, because a member of it may be
                dead.
            colocated: True if each trainer shares its GPU with a rollout rank. It then sends to that rank only.
            rollout_ranks: Rollout ranks in the group, ascending; None: all, from 0.
            engine: The ranks of each engine; see `cuts.engine_ranks`. Each gets its part of the weights.
            control: This rank's place in the joint world, over another store; None: over the run's store.
            timeout: Longest wait for the others; None: ``rl_safe.timeouts.joint``.

        Raises:
            PhaseTimeoutError: If some joint rank does not arrive in time; names it.
            WeightSyncError: If the group cannot be connected.
        """
        self.rank.before(Phase.JOINT)
        door = self._entry.door
        with self.rank.lifecycle.enter(Phase.JOINT), nullcontext() if door is None else door.opened():
            self.leave(failed=generation > 0)
            if tuple(engine) != self._engine:
                self._engine, self._buckets = tuple(engine), {}
            self._colocated = colocated
            self.joint_group = (GpuPair if colocated else JointGroup)(
                control
                or self.rank.control.of_world(
                    joint_world(generation),
                    rank=self.rank.training_rank,
                    members=joint_ids(trainers=self.rank.training_size, size=size, rollout_ranks=rollout_ranks),
                ),
                generation=generation,
                timeout=self.rank.timeout(Phase.JOINT) if timeout is None else timeout,
                device=self.rank.device,
                sync_timeout=self.rank.timeout(Phase.SYNC),
                parts=len(engine),
            )
            if self.rank.training_rank == 0:
                forget_joint_groups(self.rank.store, before=generation)

    def leave(self, *, failed: bool = False) -> None:
        """Leaves the joint group. Not collective; idempotent.

        Args:
            failed: True if a collective in the group may never end. The group is then aborted, within 10 s.
        """
        group = self.detach()
        if group is not None:
            (group.abort if failed else group.close)()

    def detach(self) -> JointGroup | GpuPair | None:
        """Returns the joint group, which the caller must close from now on; None if there is none."""
        group, self.joint_group = self.joint_group, None
        self._on_its_way.clear()
        return group

    def weight_specs(self) -> tuple[WeightSpec, ...]:
        """Describes all HF weights in the order of sending. Collective over: the training world.

        Call it once the model is built, and again after a rebuild. If the host has ``own_hf_weights``, like
        `MegatronPolicy`, a rank that holds a weight sends it. Otherwise, ``export_hf_weights`` brings all weights to
        training rank 0, which sends them.

        Raises:
            WeightSyncError: If two ranks would send the same weight.
        """
        host = self.rank.host
        own = host.own_hf_weights() if isinstance(host, OwnWeightsHost) else None
        if own is None:
            self._outgoing = Outgoing.of_all(host.export_hf_weights)
        else:
            self._outgoing = Outgoing.of_own(own, training_rank=self.rank.training_rank)
        self._buckets = {}
        return self._outgoing.specs

    def send_weights(self, *, bucket_bytes: int, prove: bool = False) -> int:
        """Sends all HF weights to the rollout ranks, each from one rank that has it. Collective over: the joint group.

        The trainers then agree on the outcome over the store. If a rollout rank dies, torch reports the failure only on
        some trainers.

        Args:
            bucket_bytes: Largest size of a bucket of whole weights, in bytes. A larger weight gets its own bucket. Two
                buckets are in memory at a time, three if colocated, plus some 64 MiB of weights that tensor parallelism
                splits. A bucket for a tensor-parallel engine has one copy of each uncut weight for each rank of the
                engine. For such engines, a copy of one kind of weights of a layer, e.g. all gate matrices of its
                experts, is in memory, too.
            prove: Whether to take digests of the weights, for ``sent``. Some 64 MiB of converted weights are then held
                until they are digested.

        Returns:
            Bytes of all buckets, from all trainers, with padding. A bucket for a tensor-parallel engine counts with all
            of its parts.

        Raises:
            LifecycleError: If `weight_specs` has not been called.
            WeightSyncError: On every trainer, if it failed on any. The joint group is then unusable: join its next
                generation.
        """
        if self._outgoing is None:
            raise LifecycleError(f"training rank {self.rank.training_rank}: call weight_specs() before send_weights()")
        with self.rank.phase(Phase.SYNC):
            complete_param_gathers(self.rank.host.chunks)
            self.sent, self._digests = _NOT_PROVED, SentDigests() if prove else None
            if bucket_bytes not in self._buckets:
                planned = plan_parts(self._outgoing.specs, self._engine, bucket_bytes=bucket_bytes)
                self._buckets[bucket_bytes] = planned, adjacent_in([bucket for bucket, _ in planned])
            buckets, adjacent = self._buckets[bucket_bytes]
            failure, buffers = self._bucket_buffers(max((parts[-1].end for _, parts in buckets), default=0))
            if self._colocated or self._outgoing.is_collective:
                # Collectives follow. A rank without memory would skip them, and the others would hang.
                self._agree(failure)
            failure = self._send(buckets, adjacent, buffers, failure)
            self._agree(failure)
            digests, self._digests = self._digests, None
            if digests is not None:
                self.sent = digests.sent()
            return sum(parts[-1].end for _, parts in buckets)

    def _bucket_buffers(self, size_bytes: int) -> tuple[Failure | None, list[torch.Tensor]]:
        """Returns a failure or None, and buffers for the buckets under way."""
        group = self.joint_group
        try:
            # A rank that has not joined still takes part in the broadcasts among the trainers.
            return None, two_buffers(size_bytes, self.rank.device) if group is None else group.buffers(size_bytes)
        except WeightSyncError as error:
            return Failure.of(error), []
        except RuntimeError as error:
            text = f"there is no room for the buffers of buckets of {size_bytes} bytes: {first_line(error)}"
            return Failure(text, foreign=foreign_cause(error)), []

    def _send(
        self,
        buckets: list[tuple[Bucket, Sequence[BucketPart]]],
        adjacent: Adjacent,
        buffers: list[torch.Tensor],
        failure: Failure | None,
    ) -> Failure | None:
        """Sends all buckets; returns the failure, or None.

        Goes on if a bucket cannot be packed or sent, so that no other rank hangs. If the export itself raises, this
        rank takes part in no further collective of the export. The other ranks wait in the export until the phase's
        deadline.
        """
        assert self._outgoing is not None, "send_weights has checked this"
        weights, group = self._outgoing.weights(adjacent), self.joint_group
        failure = failure or self._digest_in_place(adjacent)
        if failure is None and group is None:
            failure = Failure("has not joined the joint group")
        if failure is not None:
            # Ranks that wait for this one in the joint group then fail at once.
            self.leave(failed=True)
        elif group is not None:
            group.limit((_SEND_SHARE_OF_PAIR if self._colocated else _SEND_SHARE) * self.rank.remaining())
        failed_now: Failure | None = None
        try:
            # Without memory this rank packs nothing. If others need its weights, `_agree` has raised before.
            for number, (bucket, parts) in enumerate(buckets if buffers else []):
                buffer = buffers[number % len(buffers)][: parts[-1].end]
                failed_now = self._pack(bucket, parts, weights, buffer)
                with self._exchanged(bucket.source, buffer):
                    if failure is not None:
                        continue
                    shares = [buffer[part.start : part.end] for part in parts]
                    failure = failed_now or self._pass_on(bucket.source, shares, ahead=len(buffers) - 1)
                    if failure is not None:
                        self.leave(failed=True)
            if failure is None and next(weights, None) is not None:
                failure = Failure("the model has more weights than were announced")
            if failure is None and self._digests is not None:
                self._digests.digest_held()
        except Exception as error:  # the other ranks wait for this rank in `_agree`
            failure = failure or failed_now or Failure.of(error)
            self.leave(failed=True)
        try:
            self._await_side_streams()
        except RuntimeError as error:
            failure = failure or Failure.of(error)
        return failure or self._flush()

    @contextmanager
    def _exchanged(self, source: int, buffer: torch.Tensor) -> Iterator[None]:
        """Broadcasts a bucket among colocated trainers, because each of them passes on all weights.

        Collective over: the training world. On a GPU, the body runs on a stream of its own, which waits for the bucket.
        The next bucket can be packed meanwhile.

        The packing stream itself waits for the bucket in two cases. First, if the export has collectives: NCCL does not
        promise that kernels of several communicators run at the same time. Second, if this rank has left the joint
        group: it then no longer waits for a buffer to be read before it packs into that buffer again.
        """
        if not self._colocated or self.rank.training_size == 1:
            yield
            return
        assert self._outgoing is not None, "send_weights has checked this"
        work = dist.broadcast(buffer, group_src=source, group=dist.group.WORLD, async_op=True)
        waits_here = self._outgoing.is_collective or self.joint_group is None
        with nullcontext() if waits_here else self._beside_packing("exchange"):
            work.wait()
            yield
        if self.joint_group is None:
            self._await_side_streams()

    def _beside_packing(self, work: str) -> AbstractContextManager[object]:
        """Returns a context in which a GPU works beside the packing, after all that was launched before."""
        device = self.rank.device
        if device.type != "cuda":
            return nullcontext()
        stream = self._side_streams.get(work)
        if stream is None:
            stream = self._side_streams[work] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)

    def _await_side_streams(self) -> None:
        """Makes the packing stream wait for the other streams. It may then write to the buffers, or free them."""
        for stream in self._side_streams.values():
            torch.cuda.current_stream(self.rank.device).wait_stream(stream)

    def _digest_in_place(self, adjacent: Adjacent) -> Failure | None:
        assert self._outgoing is not None, "send_weights has checked this"
        try:
            if self._digests is not None:
                with self._beside_packing("digests"):
                    self._outgoing.digest_in_place(self._digests, adjacent)
        except Exception as error:  # the other ranks wait for this rank in `_agree`
            return Failure.of(error)
        return None

    def _pack(
        self, bucket: Bucket, parts: Sequence[BucketPart], weights: Items, buffer: torch.Tensor
    ) -> Failure | None:
        assert self._outgoing is not None, "send_weights has checked this"
        try:
            rank, digests = self.rank.training_rank, self._digests
            self._outgoing.pack(bucket, weights, buffer, training_rank=rank, parts=parts, digests=digests)
        except Exception as error:
            return Failure.of(error)
        return None

    def _pass_on(self, source: int, parts: Sequence[torch.Tensor], *, ahead: int) -> Failure | None:
        """Starts to send a packed bucket to the rollout ranks, and waits until only ``ahead`` are under way.

        The next buffer is then free. Buckets are packed while earlier ones are sent.
        """
        try:
            assert self.joint_group is not None, "without it, `_send` has found a failure"
            self._on_its_way.append(self.joint_group.broadcast(*parts, source=source))
            if len(self._on_its_way) > ahead:
                self._on_its_way.popleft()()
        except WeightSyncError as error:
            return Failure.of(error)
        return None

    def _flush(self) -> Failure | None:
        try:
            assert self.joint_group is not None, "without it, `_send` has found a failure"
            while self._on_its_way:
                self._on_its_way.popleft()()
            self.joint_group.flush(_FLUSH_SHARE * self.rank.remaining())
        except WeightSyncError as error:
            return Failure.of(error)
        return None

    def _agree(self, failure: Failure | None) -> None:
        """Raises on every trainer if one has failed. Uses the store, because the world's own groups may have failed."""
        failed = self.rank.failed_ranks(Phase.SYNC, failure)
        if failed:
            self.leave(failed=True)
            self._digests = None
            # A rank that has failed names itself. The others prefer a rank whose failure is its own.
            first = min(failed, key=lambda rank: (failed[rank].foreign.is_about_others, rank))
            culprit = self.rank.training_rank if self.rank.training_rank in failed else first
            raise WeightSyncError(
                f"weight sync failed on training rank {format_ranks(failed)}: {failed[culprit].text}",
                culprit=trainer_id(culprit),
                foreign=failed[culprit].foreign,
            )
