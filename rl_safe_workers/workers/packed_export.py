"""Brings a model's HF weights to every training rank, in a few large buckets instead of one by one.

The buckets go over the default group, so its NCCL channels must not be limited.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from rl_safe_workers.models.own_weights import OwnWeight
from rl_safe_workers.rollout.packing import adjacent_in
from rl_safe_workers.rollout.protocol import Bucket, plan_buckets
from rl_safe_workers.rollout.sent_digests import SentDigests
from rl_safe_workers.workers.outgoing import Outgoing


class PackedExport:
    """Sends a model's weights to all training ranks, each weight from a rank that has it.

    Attributes:
        buckets: The buckets in the order of sending.
    """

    def __init__(self, own: Sequence[OwnWeight], *, training_rank: int, bucket_bytes: int) -> None:
        """Finds out which rank sends which weight. Collective over: the training world.

        Args:
            own: The weights that this rank helps to build.
            training_rank: This rank.
            bucket_bytes: Largest size of a bucket in bytes. A larger weight gets its own bucket.

        Raises:
            WeightSyncError: If two ranks would send the same weight.
        """
        self._rank = training_rank
        self._outgoing = Outgoing.of_own(own, training_rank=training_rank, by_source=True)
        self.buckets: list[Bucket] = plan_buckets(self._outgoing.specs, bucket_bytes=bucket_bytes)
        self._adjacent = adjacent_in(self.buckets)

    def tensors(self, device: torch.device, *, digests: SentDigests | None = None) -> Iterator[torch.Tensor]:
        """Yields the memory of each bucket: uint8, ``[size_bytes]``. Collective over: the training world, at each item.

        A bucket is in memory for as long as the caller keeps it. The next one has memory of its own.

        Args:
            device: The model's device. A GPU does its part on the current stream.
            digests: Takes digests of the weights that this rank sends, before it packs them.

        Raises:
            WeightSyncError: If a weight is not as it was planned.
            RuntimeError: If there is no memory for a bucket.
        """
        if digests is not None:
            self._outgoing.digest_in_place(digests, self._adjacent)
        weights = self._outgoing.weights(self._adjacent)
        for bucket in self.buckets:
            buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8, device=device)
            self._outgoing.pack(bucket, weights, buffer, training_rank=self._rank, digests=digests)
            if digests is not None:
                digests.digest_held()  # the weights may be freed once they are packed
            dist.broadcast(buffer, group_src=bucket.source, group=dist.group.WORLD)
            yield buffer
            del buffer  # before the next one is made
