"""The weights that a sync sends: every HF weight once, from a training rank that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from rl_safe_workers.comms.json_gather import gather_json
from rl_safe_workers.compat.torch_copies import copy_each
from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.models.own_weights import OwnWeight
from rl_safe_workers.rollout.packing import DTYPES, dtype_name, places
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec
from rl_safe_workers.rollout.sent_digests import AT_ONCE_BYTES

Weights = Iterator[tuple[str, torch.Tensor]]
Digest = Callable[[Sequence[torch.Tensor]], None]

_NOTHING = ("nothing", torch.empty(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """All weights in the order of sending, and the weights that this rank helps to make."""

    specs: tuple[WeightSpec, ...]
    mine: frozenset[str]
    is_collective: bool
    """True if some rank needs collectives of the training world to make its weights."""
    weights: Callable[[], Weights]
    """Yields this rank's weights from the start, in the order of ``specs``. May be collective at each item."""

    @classmethod
    def of_all(cls, export: Callable[[], Weights]) -> Outgoing:
        """Uses an export that gives every weight to every rank; rank 0 sends. Collective over: the training world."""
        specs = tuple(
            WeightSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
            for name, tensor in export()
        )
        return cls(specs=specs, mine=frozenset(spec.name for spec in specs), is_collective=True, weights=export)

    @classmethod
    def of_own(cls, own: Sequence[OwnWeight], *, training_rank: int) -> Outgoing:
        """Uses the weights that each rank makes from its own parameters. Collective over: the training world.

        Weights of one kind, such as one matrix of all experts of a layer, are sent together, in the order of their
        sending ranks. vLLM holds them in one tensor, and a layer waits for all of them.

        Raises:
            WeightSyncError: If two ranks would send the same weight.
        """
        mine = [
            (weight.place, training_rank, number, name, shape, dtype_name(weight.dtype))
            for number, weight in enumerate(own)
            if weight.is_source
            for name, shape in zip(weight.names, weight.shapes, strict=True)
        ]
        is_split = any(weight.is_split for weight in own)
        everyone = gather_json((mine, is_split), group=dist.group.WORLD)  # type: ignore[arg-type]
        # The sort is stable, so the weights of one parameter keep their order.
        entries = sorted(chain.from_iterable(entries for entries, _ in everyone), key=lambda entry: entry[:3])
        specs = tuple(
            WeightSpec(name=name, dtype=dtype, shape=tuple(shape), source=source)
            for _, source, _, name, shape, dtype in entries
        )
        if len({spec.name for spec in specs}) < len(specs):
            raise WeightSyncError("two training ranks would send the same weight")
        in_order = sorted(own, key=lambda weight: weight.place)

        def weights() -> Weights:
            for weight in in_order:
                yield from zip(weight.names, weight.make(), strict=True)

        return cls(
            specs=specs,
            mine=frozenset(name for weight in own for name in weight.names),
            is_collective=any(is_split for _, is_split in everyone),
            weights=weights,
        )

    def pack(
        self,
        bucket: Bucket,
        weights: Weights,
        buffer: torch.Tensor,
        *,
        training_rank: int,
        digest: Digest | None = None,
    ) -> None:
        """Takes a bucket's weights. On the sending rank, copies them side by side into the buffer.

        Args:
            bucket: The next bucket.
            weights: This rank's weights, as `weights` yields them. The call takes those of the bucket.
            buffer: ``[bucket.size_bytes]`` of uint8; written only on the bucket's source.
            training_rank: This rank.
            digest: Called on the bucket's source with the weights before they are copied.

        Raises:
            WeightSyncError: If a weight does not match its announcement.
        """
        if bucket.source != training_rank:
            for spec in bucket.specs:
                if spec.name in self.mine:
                    self._take(spec, weights)
            return
        targets: list[torch.Tensor] = []
        tensors: list[torch.Tensor] = []
        waiting_bytes = 0
        for spec, size, place in zip(bucket.specs, bucket.sizes, places(bucket, buffer), strict=True):
            targets.append(place)
            tensors.append(self._take(spec, weights))
            waiting_bytes += size
            if waiting_bytes > AT_ONCE_BYTES:
                _copy(targets, tensors, digest)
                waiting_bytes = 0
        _copy(targets, tensors, digest)

    @staticmethod
    def _take(spec: WeightSpec, weights: Weights) -> torch.Tensor:
        name, tensor = next(weights, _NOTHING)
        if name != spec.name or tensor.shape != spec.shape or tensor.dtype != DTYPES[spec.dtype]:
            raise WeightSyncError(
                f"weight {name} {dtype_name(tensor.dtype)} {tuple(tensor.shape)} was announced as "
                f"{spec.name} {spec.dtype} {spec.shape}"
            )
        return tensor


def _copy(targets: list[torch.Tensor], tensors: list[torch.Tensor], digest: Digest | None) -> None:
    """Copies all in one launch, and empties both lists. A launch for each expert would cost more than the transfer."""
    if digest is not None:
        digest(tensors)
    copy_each(targets, tensors)
    targets.clear()
    tensors.clear()
