"""Maps weights to places in a bucket's memory, in the same way on the sending and the receiving ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

import torch

from rl_safe_workers.compat.torch_copies import copy_each
from rl_safe_workers.rollout.cuts import BucketPart
from rl_safe_workers.rollout.protocol import ITEM_BYTES, Bucket, WeightSpec

Adjacent = frozenset[tuple[str, str]]
"""Pairs of names of weights; see `adjacent_in`."""
NamedTensor = tuple[str, torch.Tensor]
"""A tensor with its name."""
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""dtypes by their names in a `WeightSpec`."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype without the prefix, e.g. ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def spec_of(name: str, tensor: torch.Tensor) -> WeightSpec:
    """Returns a weight's name, dtype and shape."""
    return WeightSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))


def split_block(
    block: torch.Tensor, slots: Iterable[int], shapes: Iterable[Sequence[int]], dtypes: Iterable[torch.dtype]
) -> list[torch.Tensor]:
    """Splits a block of memory into consecutive tensors. Splits equal neighbours together, for speed.

    Args:
        block: ``[sum(slots)]``, uint8.
        slots: Bytes from the start of each tensor to the start of the next, or to the block's end. A slot may be larger
            than its tensor.
        shapes: Shape of each tensor.
        dtypes: dtype of each tensor.
    """
    runs = [(kind, sum(1 for _ in equal)) for kind, equal in groupby(zip(dtypes, shapes, slots, strict=True))]
    blocks = block.split_with_sizes([count * slot for (_, _, slot), count in runs])
    found: list[torch.Tensor] = []
    for ((dtype, shape, slot), count), part in zip(runs, blocks, strict=True):
        places = part.view(dtype).view(count, slot // dtype.itemsize)[:, : math.prod(shape)]
        found += places.view(count, *shape).unbind()
    return found


def slots_of(bucket: Bucket) -> list[int]:
    """Returns the bytes that each weight of a bucket takes, with padding."""
    return [end - start for start, end in pairwise((*bucket.offsets, bucket.size_bytes))]


def adjacent_in(buckets: Iterable[Bucket]) -> Adjacent:
    """Returns the pairs of names of weights that are adjacent in a bucket, without padding between them."""
    return frozenset(
        (one.name, following.name)
        for bucket in buckets
        for (one, following), slot, size in zip(pairwise(bucket.specs), slots_of(bucket), bucket.sizes, strict=False)
        if slot == size
    )


def places_in(bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Returns a view of each weight of a bucket in its buffer, ``[bucket.size_bytes]`` of uint8."""
    specs = bucket.specs
    return split_block(buffer, slots_of(bucket), [spec.shape for spec in specs], [DTYPES[spec.dtype] for spec in specs])


def whole_weights(
    bucket: Bucket, part: BucketPart, buffer: torch.Tensor | None, *, device: torch.device
) -> list[NamedTensor]:
    """Returns whole weights for loaders that take whole weights, but read only the cut of their own rank.

    Args:
        bucket: The whole weights.
        part: The part of ``bucket`` that this rank gets.
        buffer: The part, ``[part.bucket.size_bytes]`` of uint8, to copy; None: the weights stay uninitialised.
        device: Device of the weights.

    Returns:
        Name and tensor of each weight, each in memory of its own. Outside of its cut, a weight is uninitialised. A
        loader must not read there; see `part_reads.PartReads`.
    """
    wholes = [torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device) for spec in bucket.specs]
    if buffer is not None:
        held = [
            whole if part_cut is None else whole.narrow(part_cut.axis, part_cut.first, part_cut.length)
            for whole, part_cut in zip(wholes, part.cuts, strict=True)
        ]
        copy_each(held, places_in(part.bucket, buffer))
    return [(spec.name, whole) for spec, whole in zip(bucket.specs, wholes, strict=True)]
