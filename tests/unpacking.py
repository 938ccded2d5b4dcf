"""Reads whole weights out of a bucket's memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rl_safe_workers.rollout.packing import places_in
from rl_safe_workers.rollout.protocol import Bucket


def unpack(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name of each weight in a bucket, with a view of it in ``buffer``, ``[bucket.size_bytes]`` of uint8."""
    yield from zip((spec.name for spec in bucket.specs), places_in(bucket, buffer), strict=True)
