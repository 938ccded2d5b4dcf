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
from rl_safe_workers.rollout.packing import DTYPES, cut, dtype_name
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec
from rl_safe_workers.rollout.sent_digests import AT_ONCE_BYTES

Items = Iterator[tuple[tuple[str, ...], torch.Tensor]]
"""Yields a tensor with its name, or a tensor whose memory is several weights, one after another, with their names."""
Digest = Callable[[Sequence[torch.Tensor]], None]

_NOTHING = (("nothing",), torch.empty(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """All weights in the order of sending, and the weights that this rank helps to make."""

    specs: tuple[WeightSpec, ...]
    mine: frozenset[str]
    is_collective: bool
    """True if some rank needs collectives of the training world to make its weights."""
    weights: Callable[[frozenset[str]], Items]
    """Yields this rank's weights from the start, in the order of ``specs``. May be collective at each item.

    The argument is the result of `adjacent_names`: only these weights may share an item with the weight before them.
    """

    @classmethod
    def of_all(cls, export: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> Outgoing:
        """Uses an export that gives every weight to every rank; rank 0 sends. Collective over: the training world."""
        specs = tuple(
            WeightSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
            for name, tensor in export()
        )
        return cls(
            specs=specs,
            mine=frozenset(spec.name for spec in specs),
            is_collective=True,
            weights=lambda _: (((name,), tensor) for name, tensor in export()),
        )

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

        def weights(adjacent: frozenset[str]) -> Items:
            for weight in in_order:
                parameter = weight.parameter
                if parameter is not None and (len(weight.names) == 1 or adjacent.issuperset(weight.names[1:])):
                    if parameter.untyped_storage().nbytes() < parameter.nbytes:
                        # A copy from it would end the process. torch checks this only when it makes a view.
                        raise WeightSyncError(f"weight {weight.names[0]}: the memory of its parameter is freed")
                    yield weight.names, parameter
                else:
                    yield from zip(zip(weight.names), weight.make(), strict=True)

        return cls(
            specs=specs,
            mine=frozenset(name for weight in own for name in weight.names),
            is_collective=any(is_split for _, is_split in everyone),
            weights=weights,
        )

    @torch.no_grad()
    def pack(
        self,
        bucket: Bucket,
        weights: Items,
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
            digest: Called on the bucket's source with the items before they are copied.

        Raises:
            WeightSyncError: If a weight does not match its announcement.
        """
        number, end = 0, len(bucket.specs)
        if bucket.source != training_rank:
            while number < end:
                number += self._take(bucket, number, weights)[1] if bucket.specs[number].name in self.mine else 1
            return
        edges = (*bucket.offsets, bucket.size_bytes)
        first, taken, slots = 0, [], []
        while number < end:
            tensor, count = self._take(bucket, number, weights)
            taken.append(tensor)
            slots.append(edges[number + count] - edges[number])
            number += count
            if edges[number] - edges[first] > AT_ONCE_BYTES or number == end:
                if digest is not None:
                    digest(taken)
                _copy(taken, buffer[edges[first] : edges[number]], slots)
                first, taken, slots = number, [], []

    @staticmethod
    def _take(bucket: Bucket, number: int, weights: Items) -> tuple[torch.Tensor, int]:
        """Takes the next item. Returns it with the number of weights in it, of which the first is ``number``."""
        spec = bucket.specs[number]
        names, tensor = next(weights, _NOTHING)
        count = len(names)
        fits = tensor.nbytes == sum(bucket.sizes[number : number + count]) and (count > 1 or tensor.shape == spec.shape)
        if names[0] != spec.name or tensor.dtype != DTYPES[spec.dtype] or not fits:
            raise WeightSyncError(
                f"weight {', '.join(names)} {dtype_name(tensor.dtype)} {tuple(tensor.shape)} was announced as "
                f"{spec.name} {spec.dtype} {spec.shape}"
            )
        return tensor, count


def _copy(tensors: Sequence[torch.Tensor], block: torch.Tensor, slots: Sequence[int]) -> None:
    """Copies all in one launch. A launch for each expert would cost more than the transfer."""
    copy_each(cut(block, slots, [one.shape for one in tensors], [one.dtype for one in tensors]), tensors)
