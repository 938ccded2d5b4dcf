"""How much device memory a communicator takes, before it exists.

A model fitted to measurements on 4 x H200, NVLink between all pairs, NCCL 2.28.9, NVLink multicast off
(``docs/benchmarks.md``). It says what NCCL takes inside one node; peers on other nodes have fewer and smaller
channels, so for a group that crosses nodes it is an upper bound.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_safe_workers.topology.groups import (
    PIPELINE,
    Classes,
    Features,
    GroupKind,
    OpClass,
    connected_classes,
    kinds_of,
    neighbours,
)
from rl_safe_workers.topology.layout import ParallelLayout

MIB = 2**20
DEFAULT_CTAS = 24
"""Channels that NCCL takes on an H200 node without a limit."""

_RING_MIB: Mapping[int, float] = {1: 22, 2: 41, 4: 76, 8: 149, 12: 244, 16: 292, 24: 484}
"""First reduction of two ranks or more, by the limit of CTAs: rings and trees."""
_ALONE_MIB: Mapping[int, float] = {1: 12, 2: 16, 4: 30, 8: 52, 24: 389}
"""The same on one rank."""
_PEER_MIB_PER_CHANNEL = 12.0
"""Of a channel to one peer, as all_to_all uses; their number is the limit rounded up to a power of two."""
_PAIR_MIB: Mapping[int, float] = {1: 12, 24: 262}
"""A pair that sends one by one."""


def _interpolated(table: Mapping[int, float], ctas: int) -> float:
    known = sorted(table)
    if ctas >= known[-1]:
        return table[known[-1]]
    above = bisect.bisect_left(known, ctas)
    if known[above] == ctas or above == 0:
        return table[known[above]]
    low, high = known[above - 1], known[above]
    return table[low] + (table[high] - table[low]) * (ctas - low) / (high - low)


def class_bytes(op_class: OpClass, *, size: int, max_ctas: int | None, pairs: int = 1) -> int:
    """Bytes on each rank that the first collective of a class takes, on a group that has none of its kind yet.

    Reductions and gathers use the same channels: whichever comes first pays for both.

    Args:
        op_class: What is issued.
        size: Members of the group.
        max_ctas: The group's limit; None for NCCL's own.
        pairs: Neighbours of this rank, where the class concerns only those.
    """
    ctas = DEFAULT_CTAS if max_ctas is None else max_ctas
    if op_class in (OpClass.REDUCE, OpClass.GATHER_SCATTER):
        return round(_interpolated(_ALONE_MIB if size == 1 else _RING_MIB, ctas) * MIB)
    if op_class is OpClass.UNBATCHED_P2P:
        return round(_interpolated(_PAIR_MIB, ctas) * pairs * MIB)
    peers = size - 1 if op_class is OpClass.ALL_TO_ALL else pairs
    channels = 1 << (min(ctas, DEFAULT_CTAS) - 1).bit_length()
    return round(_PEER_MIB_PER_CHANNEL * channels * peers * MIB)


def costs(classes: Sequence[OpClass], *, size: int, max_ctas: int | None, pairs: int = 1) -> list[int]:
    """Bytes on each rank that each class of a group takes, in this order: the first on rings pays for both."""
    found, rings = [], False
    for op_class in classes:
        is_ring = op_class in (OpClass.REDUCE, OpClass.GATHER_SCATTER)
        free = is_ring and rings
        found.append(0 if free else class_bytes(op_class, size=size, max_ctas=max_ctas, pairs=pairs))
        rings = rings or is_ring
    return found


def group_bytes(classes: Sequence[OpClass], *, size: int, max_ctas: int | None, pairs: int = 1) -> int:
    """Bytes on each rank that a group takes once all its classes are connected."""
    return sum(costs(classes, size=size, max_ctas=max_ctas, pairs=pairs))


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedGroup:
    """One group of a rank, before it exists.

    Example: ``PredictedGroup(description="EXPERT_DATA_PARALLEL_GROUP", kind=…, size=2, classes=…, max_ctas=None,
    bytes=507510784)``
    """

    description: str
    kind: GroupKind
    size: int
    classes: Classes
    max_ctas: int | None
    bytes: int


def pairs_of(description: str, size: int) -> int:
    """How many pairs a rank of a group sends in one by one, or how many neighbours it has.

    Of two pipeline stages each direction is a pair of its own, one of them over the default group.
    """
    return 2 if description == PIPELINE else neighbours(size)


def predict_groups(layout: ParallelLayout, features: Features, limits: Mapping[str, int]) -> list[PredictedGroup]:
    """Returns the groups that a bootstrap connects on a rank, and their bytes, the heaviest first.

    It is the rank with most groups: the first or last pipeline stage, which is in the embedding group.

    Args:
        layout: Sizes of the training world's axes.
        features: What decides about the collectives.
        limits: CTAs by key; keys without one have NCCL's own limit.
    """
    found = []
    for description, kind in kinds_of(layout, features).items():
        size, limit = kind.size(layout, features), limits.get(kind.key)
        classes = connected_classes(kind, size, layout, features)
        pairs = pairs_of(description, size)
        if classes:
            found.append(
                PredictedGroup(
                    description=description, kind=kind, size=size, classes=classes, max_ctas=limit,
                    bytes=group_bytes(classes, size=size, max_ctas=limit, pairs=pairs),
                )
            )  # fmt: skip
    return sorted(found, key=lambda group: -group.bytes)
