"""Predicts the device memory of a communicator before it exists.

The model comes from measurements on H200s, with NVLink between all pairs, NCCL 2.28.9 and NVLink multicast off
(``docs/benchmarks.md``). Inside one host it is exact for 2 and 4 ranks, with limits of 1 to 20 CTAs and without one:

    a communicator          4 MiB, and 6 for each P2P channel: the limit of CTAs rounded up to a power of two
    its rings and trees     12 MiB for each CTA, at the first reduction or gather
    a connection to send    2 MiB for each P2P channel, at the first send to that peer
    a connection to receive 10 MiB for each P2P channel

A group whose ranks are on several hosts has at most two channels if the hosts are connected by sockets. Connections to
ranks on other hosts then have their buffers in host memory, and take no device memory. RDMA was not measured. Its
buffers can be in device memory, and one report (radixark/Megatron-LM 62: a gather of 64 ranks) fits the model above. So
a group on several hosts counts there like one inside a host, as an upper bound.
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
"""Number of channels that NCCL uses on an H200 node without a limit."""
KERNEL_BYTES = 418 * MIB
"""Bytes that NCCL's kernels take once in a process: their code, and the stack of the largest kernel."""

_BASE_MIB, _BASE_MIB_PER_CHANNEL = 4, 6
_RING_MIB_PER_CTA = 12
_RECEIVED_MIB_PER_CHANNEL = 10
_EXCHANGE_MIB_PER_CHANNEL = 2 + _RECEIVED_MIB_PER_CHANNEL
"""MiB per P2P channel of a connection to send and a connection to receive together."""
_ALONE_CHANNELS = 64
"""P2P channels of a communicator of one rank without a limit."""
_SOCKET_CTAS = 2
"""Channels of a group whose ranks are on several hosts with sockets between them."""


@dataclass(frozen=True, slots=True)
class Links:
    """The unbatched point-to-point connections of a rank.

    Example: ``Links(pairs=2, exchanges=1)``: sends to one neighbour over one pair, receives from the other over another
    """

    pairs: int
    """Number of pairs. Each pair has its own communicator of two ranks."""
    exchanges: int
    """Number of connections to send, which is also the number of connections to receive."""


def links_of(description: str, size: int, features: Features) -> Links:
    """Returns the unbatched connections of a rank in the middle of a pipeline, or in a ring.

    Two pipeline stages have a separate pair for each direction, and one of them uses the default group
    (p2p_communication.py:67). Virtual stages send in both directions on both pairs.
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


def costs(
    classes: Sequence[OpClass], *, size: int, max_ctas: int | None, links: Links, near: int | None = None
) -> list[int]:
    """Returns the bytes that the first collective of each op class takes on each rank, if issued in this order.

    The first collective creates the communicator. Reductions and gathers share the same rings. Batched sends use the
    connections of all_to_all, if it came before.

    Args:
        classes: The op classes, in the order of their first collectives.
        size: Number of ranks of the group.
        max_ctas: The group's limit in CTAs; None for NCCL's default.
        links: The unbatched connections of this rank. They count only if ``classes`` has unbatched P2P.
        near: Number of the group's ranks on this rank's host, itself included, if the other hosts are reached over
            sockets. None if all ranks are on this host, or if the network is not known.
    """
    if near is None or near >= size:
        near = size
    else:
        max_ctas = min(_ctas(max_ctas), _SOCKET_CTAS)
    channels, made = _channels(size, max_ctas), set[str]()
    base = _BASE_MIB + _BASE_MIB_PER_CHANNEL * channels
    # In a root exchange, the first rank takes most: it has a channel to every peer.
    to_all = dict.fromkeys((OpClass.ALL_TO_ALL, OpClass.ROOT_EXCHANGE), near - 1)
    peers = {**to_all, OpClass.BATCHED_P2P: min(near - 1, neighbours(size))}
    # Of a ring through several hosts, a rank has one or two neighbours on its own host. What it receives takes most.
    ring = _RING_MIB_PER_CTA if near == size or near > 2 else _RECEIVED_MIB_PER_CHANNEL * (near - 1)
    found = []
    for op_class in classes:
        if op_class is OpClass.UNBATCHED_P2P:
            exchanges = links.exchanges if near > 1 else 0
            found.append(links.pairs * base + exchanges * _EXCHANGE_MIB_PER_CHANNEL * channels)
            continue
        is_exchange = op_class in peers
        part = "exchanges" if is_exchange else "rings"
        mib = 0 if made else base
        if part not in made and size > 1:
            mib += _EXCHANGE_MIB_PER_CHANNEL * channels * peers[op_class] if is_exchange else ring * _ctas(max_ctas)
        made.add(part)
        found.append(mib)
    return [mib * MIB for mib in found]


def over_world_bytes(stages: int, max_ctas: int | None) -> int:
    """Returns the bytes that batches between pipeline stages take on the default group, which has its rings already.

    Args:
        stages: Number of pipeline stages, at least 2.
        max_ctas: The default group's limit in CTAs; None for NCCL's default.
    """
    return _EXCHANGE_MIB_PER_CHANNEL * _channels(stages, max_ctas) * neighbours(stages) * MIB


def group_bytes(
    classes: Sequence[OpClass], *, size: int, max_ctas: int | None, links: Links, near: int | None = None
) -> int:
    """Returns the bytes that a group takes on each rank when all its op classes are connected; arguments of `costs`."""
    return sum(costs(classes, size=size, max_ctas=max_ctas, links=links, near=near))


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedGroup:
    """The prediction for one group of a rank.

    Example: ``PredictedGroup(description="EXPERT_DATA_PARALLEL_GROUP", kind=…, size=2, classes=…, max_ctas=None,
    bytes=507510784)``
    """

    description: str
    kind: GroupKind
    size: int
    classes: Classes
    max_ctas: int | None
    """Limit in CTAs; None for NCCL's default."""
    bytes: int
    """Device memory on each rank."""


def predict_groups(layout: ParallelLayout, features: Features, limits: Mapping[str, int]) -> list[PredictedGroup]:
    """Returns the groups that a bootstrap connects on a rank, with their bytes, the largest first.

    The prediction is for the ranks with most groups: the first and last pipeline stage, which are in the embedding
    group.

    Args:
        layout: Sizes of the training world's axes.
        features: Features of the run that decide which collectives the groups carry.
        limits: Limits in CTAs by key. Groups without an entry have NCCL's default.
    """
    found = []
    for description, kind in kinds_of(layout, features).items():
        size, limit = kind.size(layout, features), limits.get(kind.key)
        classes = connected_classes(kind, size, layout, features)
        links = links_of(description, size, features)
        if classes:
            found.append(
                PredictedGroup(
                    description=description,
                    kind=kind,
                    size=size,
                    classes=classes,
                    max_ctas=limit,
                    bytes=group_bytes(classes, size=size, max_ctas=limit, links=links),
                )
            )
    return sorted(found, key=lambda group: -group.bytes)
