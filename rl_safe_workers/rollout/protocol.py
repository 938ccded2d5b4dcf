"""Defines the data between rollout ranks and the rest of a run: samples, and weights in buckets.

Imports neither torch nor vLLM, so that the driver can import it.
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
"""Bytes of an element, by torch's name of the dtype."""
ALIGNMENT_BYTES = 16
"""Every tensor starts at a multiple of this number of bytes in its bucket, so that any dtype can view it."""
FIRST_BUCKET_BYTES = 64 * 2**20
"""Largest size of the first bucket of a weight sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response to one prompt.

    Example: ``Sample(prompt_ids=[5, 9], response_ids=[7, 2], logprobs=[-1.2, -0.4], text="a")``
    """

    prompt_ids: list[int]
    response_ids: list[int]
    """At least one token. The last one is an end-of-sequence token, unless the response was cut at the length limit."""
    logprobs: list[float]
    """The rollout's log-probability of each response token, in nats."""
    text: str
    """The response without special tokens."""
    routed_experts: NDArray[np.unsignedinteger[Any]] | None = None
    """Experts of every token but the last, which was only sampled: ``[prompt + response - 1, layers, top_k]``. None if
    ``rollout.enable_rollout_routing_replay`` is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """One HF weight, e.g. ``WeightSpec(name="lm_head.weight", dtype="float32", shape=(128, 128))``."""

    name: str
    dtype: str
    """torch's name of the dtype, without ``torch.``."""
    shape: tuple[int, ...]
    source: int = 0
    """Training rank that sends the weight."""

    @property
    def size_bytes(self) -> int:
        """The size of the tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def slot_bytes(self) -> int:
        """The size of the weight's place in a bucket in bytes, with padding."""
        return -(-self.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Consecutive weights from one source, which are sent together."""

    specs: tuple[WeightSpec, ...]
    offsets: tuple[int, ...]
    """Offset of each weight in the bucket, in bytes."""
    sizes: tuple[int, ...]
    """Size of each weight in bytes, without padding."""
    size_bytes: int
    """Size of the bucket in bytes, with padding."""

    @property
    def source(self) -> int:
        """The training rank that sends the bucket."""
        return self.specs[0].source


def plan_buckets(specs: Sequence[WeightSpec], *, bucket_bytes: int) -> list[Bucket]:
    """Divides weights into buckets of at most ``bucket_bytes``, in order. A new source starts a new bucket.

    The first bucket has at most `FIRST_BUCKET_BYTES`, so that the first broadcast begins early. Each later bucket is
    packed while another one is sent. A weight larger than the limit gets its own bucket. Both sides compute the same
    buckets from the same specs, so only the specs are sent.
    """
    buckets: list[Bucket] = []
    current: list[WeightSpec] = []
    used = 0
    for spec in specs:
        limit = bucket_bytes if buckets else min(bucket_bytes, FIRST_BUCKET_BYTES)
        if current and (used + spec.slot_bytes > limit or spec.source != current[0].source):
            buckets.append(bucket_of(current))
            current, used = [], 0
        current.append(spec)
        used += spec.slot_bytes
    if current:
        buckets.append(bucket_of(current))
    return buckets


def bucket_of(specs: Sequence[WeightSpec]) -> Bucket:
    """Returns weights of one source as one bucket."""
    *offsets, end = accumulate((spec.slot_bytes for spec in specs), initial=0)
    sizes = tuple(spec.size_bytes for spec in specs)
    return Bucket(specs=tuple(specs), offsets=tuple(offsets), sizes=sizes, size_bytes=end)
