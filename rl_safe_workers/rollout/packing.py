"""Where weights lie in a bucket's memory: the same on the rank that sends it and on those that receive it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_safe_workers.rollout.protocol import ITEM_BYTES, Bucket


def places(bucket: Bucket, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields each weight's place, a view of its shape and dtype.

    Args:
        bucket: What lies in ``buffer``.
        buffer: ``[bucket.size_bytes]`` of uint8.
    """
    typed = {dtype: buffer.view(getattr(torch, dtype)) for dtype in {spec.dtype for spec in bucket.specs}}
    for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
        item_bytes = ITEM_BYTES[spec.dtype]
        flat = typed[spec.dtype].narrow(0, offset // item_bytes, spec.size_bytes // item_bytes)
        yield flat.view(spec.shape)


def unpack(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights that lie in a bucket's buffer, by name, as views."""
    yield from zip((spec.name for spec in bucket.specs), places(bucket, buffer), strict=True)
