"""How much device memory a communicator takes, before it exists.

A model of what was measured on 4 x H200, NVLink between all pairs, NCCL 2.28.9, NVLink multicast off
(``docs/benchmarks.md``); for 2 and 4 ranks and limits of 1 to 20 CTAs, and none, it is exact. It says what NCCL takes
inside one node; peers on other nodes have fewer and smaller channels, so for a group that crosses nodes it is an upper
bound.

    a communicator          4 MiB, and 6 for each P2P channel: the limit of CTAs rounded up to a power of two
    its rings and trees     12 MiB for each CTA, at the first reduction or gather
    a connection to send    2 MiB for each P2P channel, at the first send to that peer
    a connection to receive 10 MiB for each P2P channel
"""

from __future__ import annotations

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
KERNEL_BYTES = 418 * MIB
"""Bytes of NCCL's kernels in a process, once: their code, and the stack of the largest."""

_BASE_MIB, _BASE_MIB_PER_CHANNEL = 4, 6
_RING_MIB_PER_CTA = 12
_EXCHANGE_MIB_PER_CHANNEL = 12
"""A send and a receive."""
_ALONE_CHANNELS = 64
"""P2P channels of a communicator of one rank without a limit."""


@dataclass(frozen=True, slots=True)
class Links:
    """The ranks that a rank sends to one by one.

    Example: ``Links(pairs=2, exchanges=1)``: to one neighbour over one pair, from the other over another one
    """

    pairs: int
    """Each has a communicator of its own, of two ranks."""
    exchanges: int
    """Connections to send, and as many to receive."""


def links_of(description: str, size: int, features: Features) -> Links:
    """Returns whom a rank in the middle of a pipeline, or in a ring, sends to.

    Of two pipeline stages each direction is a pair of its own, one of them over the default group
    (p2p_communication.py:67); virtual stages send both ways on both.
    """
    if description == PIPELINE and size == 2:
        return Links(pairs=2, exchanges=2 if features.virtual_pipeline else 1)
    return Links(pairs=neighbours(size), exchanges=neighbours(size))


def _channels(size: int, max_ctas: int | None) -> int:
    if max_ctas is None and size == 1:
        return _ALONE_CHANNELS
    return 1 << (_ctas(max_ctas) - 1).bit_length()


def _ctas(max_ctas: int | None) -> int:
    return DEFAULT_CTAS if max_ctas is None else min(max_ctas, DEFAULT_CTAS)


def costs(classes: Sequence[OpClass], *, size: int, max_ctas: int | None, links: Links) -> list[int]:
    """Bytes on each rank that the first collective of each class takes, if they come in this order.

    The first of them makes the communicator; reductions and gathers use the same rings, and a batch of sends what
    all_to_all has connected.

    Args:
        classes: What is issued.
        size: Members of the group.
        max_ctas: The group's limit; None for NCCL's own.
        links: Whom this rank sends to one by one, where it does.
    """
    channels, made = _channels(size, max_ctas), set[str]()
    base = _BASE_MIB + _BASE_MIB_PER_CHANNEL * channels
    peers = {OpClass.ALL_TO_ALL: size - 1, OpClass.BATCHED_P2P: neighbours(size)}
    found = []
    for op_class in classes:
        if op_class is OpClass.UNBATCHED_P2P:
            found.append(links.pairs * base + links.exchanges * _EXCHANGE_MIB_PER_CHANNEL * channels)
            continue
        exchanges = op_class in peers
        part = "exchanges" if exchanges else "rings"
        mib = 0 if made else base
        if part not in made and size > 1:
            mib += _EXCHANGE_MIB_PER_CHANNEL * channels * peers[op_class] if exchanges else 0
            mib += 0 if exchanges else _RING_MIB_PER_CTA * _ctas(max_ctas)
        made.add(part)
        found.append(mib)
    return [mib * MIB for mib in found]


def group_bytes(classes: Sequence[OpClass], *, size: int, max_ctas: int | None, links: Links) -> int:
    """Bytes on each rank that a group takes once all its classes are connected."""
    return sum(costs(classes, size=size, max_ctas=max_ctas, links=links))


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
        links = links_of(description, size, features)
        if classes:
            found.append(
                PredictedGroup(
                    description=description, kind=kind, size=size, classes=classes, max_ctas=limit,
                    bytes=group_bytes(classes, size=size, max_ctas=limit, links=links),
                )
            )  # fmt: skip
    return sorted(found, key=lambda group: -group.bytes)


def far_bytes(group: PredictedGroup, gpus_per_node: int | None) -> int:
    """Returns the bytes of a group's all_to_all with ranks that must be on other nodes: the part that is not sure.

    Args:
        group: The group.
        gpus_per_node: Ranks of a node at most; None: all may be on one.
    """
    if gpus_per_node is None or OpClass.ALL_TO_ALL not in group.classes:
        return 0
    far = max(0, group.size - gpus_per_node)
    return far * _EXCHANGE_MIB_PER_CHANNEL * _channels(group.size, group.max_ctas) * MIB
