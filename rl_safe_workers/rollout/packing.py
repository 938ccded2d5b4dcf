"""Where weights lie in a bucket's memory: the same on the rank that sends it and on those that receive it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_safe_workers.rollout.protocol import ITEM_BYTES, Bucket

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""By their names in a `WeightSpec`."""


def places(bucket: Bucket, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields each weight's place, a view of its shape and dtype.

    Args:
        bucket: What lies in ``buffer``.
        buffer: ``[bucket.size_bytes]`` of uint8.
    """
    # Few calls for each weight, for there may be thousands.
    ends = (*bucket.offsets[1:], bucket.size_bytes)
    slots = [end - start for start, end in zip(bucket.offsets, ends, strict=True)]
    for spec, size, slot in zip(bucket.specs, bucket.sizes, buffer.split_with_sizes(slots), strict=True):
        flat = slot if len(slot) == size else slot[:size]
        yield flat.view(DTYPES[spec.dtype]).view(spec.shape)


def unpack(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights that lie in a bucket's buffer, by name, as views."""
    yield from zip((spec.name for spec in bucket.specs), places(bucket, buffer), strict=True)
