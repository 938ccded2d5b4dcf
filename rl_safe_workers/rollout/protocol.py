"""Data that passes between rollout ranks and the rest of a run: samples, and weights cut into buckets.

Without torch or vLLM, so that the driver can read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}
ALIGNMENT_BYTES = 16
"""Every tensor starts at a multiple of this in its bucket, so that any dtype can view it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response to one prompt.

    Example: ``Sample(prompt_ids=[5, 9], response_ids=[7, 2], logprobs=[-1.2, -0.4], text="a")``
    """

    prompt_ids: list[int]
    response_ids: list[int]
    """At least one token; ends with an end-of-sequence token unless cut at the length limit."""
    logprobs: list[float]
    """The rollout's log-probability, in nats, of each response token."""
    text: str
    """The response without special tokens."""
    routed_experts: NDArray[np.unsignedinteger[Any]] | None = None
    """``[prompt + response - 1, layers, top_k]``: the experts of every token but the last, which was only sampled; None
    unless ``rollout.enable_rollout_routing_replay`` asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """One HF weight, e.g. ``WeightSpec(name="lm_head.weight", dtype="float32", shape=(128, 128))``."""

    name: str
    dtype: str
    """torch's name without the prefix."""
    shape: tuple[int, ...]
    source: int = 0
    """Training rank that sends it."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def slot_bytes(self) -> int:
        """Bytes of its place in a bucket."""
        return -(-self.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive weights of one source that travel in one broadcast."""

    specs: tuple[WeightSpec, ...]
    offsets: tuple[int, ...]
    """Byte offset of each weight."""
    sizes: tuple[int, ...]
    """Bytes of each weight, without the padding behind it."""
    size_bytes: int

    @property
    def source(self) -> int:
        """Training rank that sends it."""
        return self.specs[0].source


def plan_buckets(specs: Sequence[WeightSpec], *, bucket_bytes: int) -> list[Bucket]:
    """Cuts weights into buckets of at most ``bucket_bytes``, in order, and wherever the source changes.

    A larger weight gets a bucket of its own.

    Both sides compute the same buckets from the same specs, so only the specs travel.
    """
    buckets: list[Bucket] = []
    current: list[WeightSpec] = []
    used = 0
    for spec in specs:
        if current and (used + spec.slot_bytes > bucket_bytes or spec.source != current[0].source):
            buckets.append(_bucket(current))
            current, used = [], 0
        current.append(spec)
        used += spec.slot_bytes
    if current:
        buckets.append(_bucket(current))
    return buckets


def _bucket(specs: Sequence[WeightSpec]) -> Bucket:
    *offsets, end = accumulate((spec.slot_bytes for spec in specs), initial=0)
    sizes = tuple(spec.size_bytes for spec in specs)
    return Bucket(specs=tuple(specs), offsets=tuple(offsets), sizes=sizes, size_bytes=end)
