"""Packs the weights that a sync sends: every HF weight once, from a training rank that has it."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress, groupby, pairwise

import torch
import torch.distributed as dist

from rl_safe_workers.comms.json_gather import gather_json
from rl_safe_workers.compat.torch_copies import copy_each
from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.models.own_weights import PLAIN, OwnWeight
from rl_safe_workers.rollout.cuts import BucketPart
from rl_safe_workers.rollout.digest import digests_of, prepared
from rl_safe_workers.rollout.packing import DTYPES, Adjacent, dtype_name, split_block
from rl_safe_workers.rollout.protocol import Bucket, WeightSpec
from rl_safe_workers.rollout.sent_digests import AT_ONCE_BYTES, SentDigests

Items = Iterator[tuple[tuple[str, ...], Sequence[torch.Tensor]]]
"""Yields items: the names of some weights, and tensors whose memory is exactly these weights, one after another. The
tensors of an item have one dtype, and the same shape except in the first dimension."""


@dataclass(slots=True)
class _Run:
    """The weights of consecutive parameters, which one call copies, or weights that `make` builds."""

    names: list[str]
    parameters: list[torch.Tensor]
    """Empty if the weights must be built."""
    make: Callable[[], Sequence[torch.Tensor]]
    """Builds the weights of the first parameter; see `OwnWeight.make`."""
    _seen: tuple[int, ...] = ()
    """The parameters' addresses when `is_freed` last found that they have their memory."""

    @property
    def addresses(self) -> tuple[int, ...]:
        """The parameters' current addresses. They change if memory is freed: torch then counts from address 0."""
        return tuple(map(torch.Tensor.data_ptr, self.parameters))

    def is_freed(self) -> bool:
        """Returns True if the memory of a parameter is freed.

        A copy from it would end the process. torch checks this only when it makes a view.
        """
        addresses = self.addresses
        if addresses != self._seen:
            if any(each.untyped_storage().nbytes() < each.nbytes for each in self.parameters):
                return True
            self._seen = addresses
        return False

    def is_as_announced(self, announced: Mapping[str, WeightSpec]) -> bool:
        """Returns True if the parameters have the dtype and the bytes of their weights."""
        specs = [announced[name] for name in self.names]
        dtype, size_bytes = DTYPES[specs[0].dtype], sum(spec.size_bytes for spec in specs)
        return all(each.dtype == dtype for each in self.parameters) and size_bytes == sum(
            each.nbytes for each in self.parameters
        )


class _Counted:
    """Iterates over items of weights, and counts the weights that were taken."""

    def __init__(self, items: Items) -> None:
        self._items, self._taken = items, 0

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> tuple[tuple[str, ...], Sequence[torch.Tensor]]:
        item = next(self._items)
        self._taken += len(item[0])
        return item

    def drain(self, number: int) -> None:
        """Takes items until ``number`` weights were taken, or there are no more."""
        while self._taken < number and next(self, None) is not None:
            pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """All weights in the order of sending, and the weights that this rank helps to make."""

    specs: tuple[WeightSpec, ...]
    mine: frozenset[str]
    is_collective: bool
    """True if some rank needs collectives of the training world to make its weights."""
    weights: Callable[[Adjacent], Items]
    """Yields this rank's weights from the start, in the order of ``specs``. May be collective at each item.

    The argument is the result of `adjacent_in`: only adjacent weights may share an item.
    """
    in_place: Callable[[Adjacent], Sequence[_Run]] = lambda _: ()
    """Returns the items of ``weights`` that this rank sends straight out of its parameters. Not collective."""
    _prepared: dict[Hashable, tuple[Sequence[str], Callable[[], torch.Tensor]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Names of the weights of ``in_place``, and a function that takes their digests. Holds only the newest entry. Its
    key is the adjacent pairs and the parameters' addresses."""

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
            weights=lambda _: (((name,), (tensor,)) for name, tensor in export()),
        )

    @classmethod
    def of_own(cls, own: Sequence[OwnWeight], *, training_rank: int, by_source: bool = False) -> Outgoing:
        """Uses the weights that each rank makes from its own parameters. Collective over: the training world.

        Weights of one kind, such as one matrix of all experts of a layer, are sent together, in the order of their
        sending ranks. vLLM holds them in one tensor, and a layer waits for all of them.

        Args:
            own: The weights that this rank makes.
            training_rank: This rank.
            by_source: True to send all weights of one rank together. They then fill fewer buckets.

        Raises:
            WeightSyncError: If two ranks would send the same weight.
        """
        mine = [
            (weight.place, training_rank, number, name, shape, dtype_name(dtype))
            for number, weight in enumerate(own)
            if weight.is_source
            for name, shape, dtype in zip(weight.names, weight.shapes, weight.dtypes, strict=True)
        ]
        is_split = any(weight.is_split for weight in own)
        everyone = gather_json((mine, is_split), group=dist.group.WORLD)  # type: ignore[arg-type]
        # The sort is stable, so the weights of one parameter keep their order.
        entries = sorted(
            chain.from_iterable(entries for entries, _ in everyone),
            key=lambda entry: (entry[1] if by_source else 0, *entry[:3]),
        )
        specs = tuple(
            WeightSpec(name=name, dtype=dtype, shape=tuple(shape), source=source)
            for _, source, _, name, shape, dtype in entries
        )
        if len({spec.name for spec in specs}) < len(specs):
            raise WeightSyncError("two training ranks would send the same weight")
        source_of: dict[tuple[str, ...], int] = {(spec.name,): spec.source for spec in specs} if by_source else {}
        # A parameter may have no weights. All ranks that help to build it then sort it among the parameters of rank 0.
        in_order = sorted(own, key=lambda weight: (source_of.get(weight.names[:1], 0), weight.place))
        sent = {spec.name for spec in specs if spec.source == training_rank}

        @functools.cache
        def runs(adjacent: Adjacent) -> list[_Run]:
            return _runs_of(in_order, adjacent)

        @functools.cache
        def in_place(adjacent: Adjacent) -> list[_Run]:
            return [run for run in runs(adjacent) if run.parameters and run.names[0] in sent]

        def weights(adjacent: Adjacent) -> Items:
            for run in runs(adjacent):
                if not run.parameters:
                    yield from zip(zip(run.names), zip(run.make()), strict=True)
                    continue
                if run.is_freed():
                    raise WeightSyncError(f"weight {_in_words(run.names)}: the memory of a parameter is freed")
                yield tuple(run.names), run.parameters

        return cls(
            specs=specs,
            mine=frozenset(name for weight in own for name in weight.names),
            is_collective=any(is_split for _, is_split in everyone),
            weights=weights,
            in_place=in_place,
        )

    def digest_in_place(self, digests: SentDigests, adjacent: Adjacent) -> None:
        """Takes the digests of all weights that this rank sends out of its parameters. Not collective.

        On a GPU, one launch takes them. Later syncs need no preparation while the parameters stay where they are. If
        the kernel cannot read a parameter in place, e.g. one of an odd number of bf16 elements, each sync prepares anew
        and copies it. Leaves out parameters whose memory is freed, or that are not as announced: `pack` refuses them.

        Args:
            digests: Collects the digests.
            adjacent: As for ``weights``.
        """
        started_s = time.monotonic()
        runs = self.in_place(adjacent)
        where = adjacent, tuple(run.addresses for run in runs)
        kept = self._prepared.get(where)  # once: to hash thousands of addresses takes time
        if kept is None:
            self._prepared.clear()
            announced = {spec.name: spec for spec in self.specs}
            sound = [run for run in runs if not run.is_freed() and run.is_as_announced(announced)]
            names = [name for run in sound for name in run.names]
            tensors = [parameter for run in sound for parameter in run.parameters]
            sizes = _sizes_in(tensors, [announced[name].size_bytes for name in names])
            take = prepared(tensors, sizes=sizes)
            if take is None:
                digests.add(names, partial(digests_of, tensors, sizes=sizes), started_s=started_s)
                return
            kept = self._prepared[where] = names, take
        digests.add(*kept, started_s=started_s)

    @torch.no_grad()
    def pack(
        self,
        bucket: Bucket,
        weights: Items,
        buffer: torch.Tensor,
        *,
        training_rank: int,
        parts: Sequence[BucketPart] = (),
        digests: SentDigests | None = None,
    ) -> None:
        """Takes a bucket's weights. On the sending rank, copies them side by side into the buffer.

        After an error it still takes the bucket's other weights: peers may wait for this rank in their collectives.

        Args:
            bucket: The next bucket.
            weights: This rank's weights, as `weights` yields them. The call takes those of the bucket.
            buffer: Memory of the bucket, uint8; written only on the bucket's source. It has ``bucket.size_bytes``, or
                ``parts[-1].end`` if there are several parts.
            training_rank: This rank.
            parts: The parts of an engine's ranks, if there are several. Then each part is copied, one after another.
            digests: Collects the digests. The bucket's source adds the missing ones before it copies the weights.

        Raises:
            WeightSyncError: If a weight does not match its announcement.
            RuntimeError: If there is no memory for a copy.
        """
        counted = _Counted(weights)
        try:
            self._pack(bucket, counted, buffer, training_rank, parts, digests)
        except Exception:
            with suppress(Exception):  # the first error is the cause
                counted.drain(sum(spec.name in self.mine for spec in bucket.specs))
            raise

    def _pack(
        self,
        bucket: Bucket,
        weights: Items,
        buffer: torch.Tensor,
        training_rank: int,
        parts: Sequence[BucketPart],
        digests: SentDigests | None,
    ) -> None:
        number, end = 0, len(bucket.specs)
        if bucket.source != training_rank:
            while number < end:
                number += self._take(bucket, number, weights)[1] if bucket.specs[number].name in self.mine else 1
            return
        edges = (*bucket.offsets, bucket.size_bytes)
        first, taken, shapes, slots, counts = 0, [], [], [], []
        while number < end:
            tensors, count = self._take(bucket, number, weights)
            taken.append(tensors)
            counts.append(count)
            shapes.append(_shape_of(tensors, sum(bucket.sizes[number : number + count])))
            slots.append(edges[number + count] - edges[number])
            number += count
            if edges[number] - edges[first] > AT_ONCE_BYTES or number == end:
                if digests is not None:
                    _hold_missing(digests, bucket, first, zip(taken, counts, strict=True))
                if len(parts) > 1:
                    _copy_parts(parts, bucket, first, zip(taken, counts, strict=True), buffer)
                else:
                    block = buffer[edges[first] : edges[number]]
                    _copy(taken, split_block(block, slots, shapes, [one[0].dtype for one in taken]))
                first, taken, shapes, slots, counts = number, [], [], [], []

    @staticmethod
    def _take(bucket: Bucket, number: int, weights: Items) -> tuple[Sequence[torch.Tensor], int]:
        """Takes the next item, which must begin with weight ``number``. Returns its tensors and its weight count."""
        spec = bucket.specs[number]
        item = next(weights, None)
        if item is None:
            raise WeightSyncError(f"weight {spec.name} was announced, but the export has ended")
        names, tensors = item
        count, first, dtype = len(names), tensors[0], DTYPES[spec.dtype]
        fits = sum(one.nbytes for one in tensors) == sum(bucket.sizes[number : number + count]) and (
            count > 1 or first.shape == spec.shape
        )
        if names[0] != spec.name or any(one.dtype != dtype for one in tensors) or not fits:
            raise WeightSyncError(
                f"weight {_in_words(names)} {dtype_name(first.dtype)} {tuple(first.shape)} was announced as "
                f"{spec.name} {spec.dtype} {spec.shape}"
            )
        return tensors, count


def _hold_missing(
    digests: SentDigests, bucket: Bucket, first: int, items: Iterable[tuple[Sequence[torch.Tensor], int]]
) -> None:
    """Holds the weights of some items that have no digest yet, to take their digests later.

    Args:
        digests: Takes the digests later.
        bucket: The bucket.
        first: Number of the first weight in the bucket.
        items: The tensors of each item, and its number of weights.
    """
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    sizes: list[int] = []
    for of_item, count in items:
        if bucket.specs[first].name not in digests:
            names += (spec.name for spec in bucket.specs[first : first + count])
            tensors += of_item
            sizes += bucket.sizes[first : first + count]
        first += count
    if names:
        digests.hold(names, tensors, _sizes_in(tensors, sizes))


def _runs_of(weights: Sequence[OwnWeight], adjacent: Adjacent) -> list[_Run]:
    """Joins adjacent weights of one form into runs, such as one matrix of all experts of a layer."""
    found: list[_Run] = []
    for weight in weights:
        parameter = weight.parameter
        if parameter is None or not adjacent.issuperset(pairwise(weight.names)):
            found.append(_Run([*weight.names], [], weight.make))
            continue
        last = found[-1] if found and (*found[-1].names[-1:], *weight.names[:1]) in adjacent else None
        if last is not None and last.parameters and _is_alike(last.parameters[0], parameter):
            last.names += weight.names
            last.parameters.append(parameter)
        else:
            found.append(_Run([*weight.names], [parameter], weight.make))
    return found


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns True if ``torch.cat`` joins two parameters along their first dimension, byte for byte."""
    return (
        type(one) in PLAIN
        and type(other) in PLAIN
        and one.numel() > 0
        and one.dim() > 0
        and (one.dtype, one.dim(), one.shape[1:]) == (other.dtype, other.dim(), other.shape[1:])
    )


def _shape_of(tensors: Sequence[torch.Tensor], size_bytes: int) -> Sequence[int]:
    """Returns the shape of tensors joined along their first dimension. They have ``size_bytes`` together."""
    first = tensors[0]
    return first.shape if len(tensors) == 1 else (size_bytes * len(first) // first.nbytes, *first.shape[1:])


def _copy(items: Sequence[Sequence[torch.Tensor]], places: Sequence[torch.Tensor]) -> None:
    """Copies each item to its place, in a few launches. A launch for each expert would cost more than the transfer."""
    for tensors, place in zip(items, places, strict=True):
        if len(tensors) > 1:
            torch.cat([*tensors], out=place)
    alone = [(place, tensors[0]) for tensors, place in zip(items, places, strict=True) if len(tensors) == 1]
    copy_each([place for place, _ in alone], [tensor for _, tensor in alone])


def _copy_parts(
    parts: Sequence[BucketPart],
    bucket: Bucket,
    first: int,
    items: Iterable[tuple[Sequence[torch.Tensor], int]],
    buffer: torch.Tensor,
) -> None:
    """Copies the cuts of consecutive weights into the parts of a bucket, in a few launches.

    Args:
        parts: The parts of an engine's ranks.
        bucket: The whole weights.
        first: Number of the first weight in the bucket.
        items: The tensors of each item, and its number of weights.
        buffer: Memory of all parts.
    """
    places: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for tensors, count in items:
        block = tensors[0].detach() if len(tensors) == 1 else torch.cat([*tensors])
        for number, weights in _alike_in(block, bucket, range(first, first + count), parts):
            for part in parts:
                cut_off = part.cuts[number]
                places.append(_place_of(part, number, len(weights), buffer))
                sources.append(
                    weights if cut_off is None else weights.narrow(cut_off.axis + 1, cut_off.first, cut_off.length)
                )
        first += count
    dense = [place.is_contiguous() and source.is_contiguous() for place, source in zip(places, sources, strict=True)]
    copy_each([*compress(places, dense)], [*compress(sources, dense)])
    for place, source, is_dense in zip(places, sources, dense, strict=True):
        if not is_dense:  # with one such tensor, `copy_each` would copy all tensors one by one
            place.copy_(source)


def _alike_in(
    block: torch.Tensor, bucket: Bucket, numbers: Sequence[int], parts: Sequence[BucketPart]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields runs of weights of one shape and one cut: the number of the first, and a tensor ``[weights, *shape]``.

    Args:
        block: Memory with the weights, one after another.
        bucket: A bucket that has them.
        numbers: Their numbers in the bucket.
        parts: The parts of the bucket, which say how it is cut.
    """
    if len(numbers) == 1:
        yield numbers[0], block.unsqueeze(0)
        return
    flat, begin, number = block.reshape(-1), 0, numbers[0]
    # An embedding, which is cut by rows, may have the shape of the next weight, which is cut by columns.
    cuts = ((bucket.specs[each].shape, [part.cuts[each] for part in parts]) for each in numbers)
    for (shape, _), alike in groupby(cuts):
        count = len([*alike])
        size = count * math.prod(shape)
        yield number, flat[begin : begin + size].view(count, *shape)
        begin, number = begin + size, number + count


def _place_of(part: BucketPart, number: int, count: int, buffer: torch.Tensor) -> torch.Tensor:
    """Returns the place of consecutive weights of one shape in a part, ``[count, *shape of the cut]``."""
    bucket, spec = part.bucket, part.bucket.specs[number]
    begin, end = bucket.offsets[number], (*bucket.offsets, bucket.size_bytes)[number + count]
    slots = buffer[part.start + begin : part.start + end].view(DTYPES[spec.dtype]).view(count, -1)
    return slots[:, : math.prod(spec.shape)].view(count, *spec.shape)


def _sizes_in(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[list[int]]:
    """Divides the sizes of weights in bytes among the tensors in whose memory they are, one after another.

    Raises:
        WeightSyncError: If a weight does not end with its tensor.
    """
    found, left = [], iter(sizes)
    for tensor in tensors:
        inside = [next(left, 0)]
        while sum(inside) < tensor.nbytes and (size := next(left, None)) is not None:
            inside.append(size)
        if sum(inside) != tensor.nbytes:
            raise WeightSyncError(f"a parameter {tuple(tensor.shape)} does not have whole weights, as announced")
        found.append(inside)
    return found


def _in_words(names: Sequence[str]) -> str:
    """Returns one or two names, or the first and the last of more, with their number."""
    return ", ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]} ({len(names)} weights)"
