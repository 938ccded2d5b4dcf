"""Maps weights to places in a bucket's memory, in the same way on the sending and the receiving ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_safe_workers.rollout.protocol import ITEM_BYTES, Bucket, WeightSpec

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""dtypes by their names in a `WeightSpec`."""


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of a dtype without the prefix, e.g. ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def spec_of(name: str, tensor: torch.Tensor) -> WeightSpec:
    """Returns a weight's name, dtype and shape."""
    return WeightSpec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))


def places(bucket: Bucket, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the place of each weight as a view of the buffer, with the weight's shape and dtype.

    Args:
        bucket: The weights in ``buffer``.
        buffer: Tensor of shape ``[bucket.size_bytes]``, uint8.
    """
    # As few calls as possible for each weight, because there may be thousands.
    ends = (*bucket.offsets[1:], bucket.size_bytes)
    slots = [end - start for start, end in zip(bucket.offsets, ends, strict=True)]
    for spec, size, slot in zip(bucket.specs, bucket.sizes, buffer.split_with_sizes(slots), strict=True):
        flat = slot if len(slot) == size else slot[:size]
        yield flat.view(DTYPES[spec.dtype]).view(spec.shape)


def unpack(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name of each weight in a bucket, with a view of it in the buffer."""
    yield from zip((spec.name for spec in bucket.specs), places(bucket, buffer), strict=True)
