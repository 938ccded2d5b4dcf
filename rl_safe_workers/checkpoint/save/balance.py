"""Decides which replica writes what. Every rank computes the rule alone, so the bytes are even without communication.

With Megatron's fully-parallel wrapper off, replica 0 writes every replicated byte and the others wait for it. All
replicas see the same set of tensors. So each one can divide the set in the same way and take its own share.

Pure Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import ceil

CUT_FRACTION = 16
"""A tensor larger than this fraction of a replica's share is cut into parts of about that size."""
CUT_BYTES = 2**20
"""No part is smaller than about this, because the cost of a save and of every later load is the number of parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A replicated tensor. Example: ``Load(key="embedding", offset=(0, 0), size_bytes=4096, rows=128)``."""

    key: str
    offset: tuple[int, ...]
    size_bytes: int
    rows: int
    """Length of the axis along which it may be cut."""


def share_out(loads: Sequence[Load], *, replicas: int, replica: int) -> list[list[slice]]:
    """Returns the rows of each tensor that one replica writes, as slices in order. For most tensors there are none.

    Every row of every tensor is written by exactly one replica. The largest share exceeds the mean by the size of one
    part at most.

    Args:
        loads: The same tensors on every replica, in any order.
        replicas: Number of ranks that hold the tensors.
        replica: Index of the replica whose rows are returned.
    """
    limit = max(CUT_BYTES, sum(load.size_bytes for load in loads) / replicas / CUT_FRACTION)
    parts = [(i, rows) for i, load in enumerate(loads) for rows in _cut(load, limit)]

    def size_bytes(part: tuple[int, slice]) -> int:
        i, rows = part
        return loads[i].size_bytes // loads[i].rows * int(rows.stop - rows.start)

    def order(part: tuple[int, slice]) -> tuple[int, str, tuple[int, ...], int]:
        # Largest first onto the least loaded (Graham's LPT rule); ties by name, so that all replicas agree.
        return -size_bytes(part), loads[part[0]].key, loads[part[0]].offset, part[1].start

    written = [(0, r) for r in range(replicas)]
    shares: list[list[slice]] = [[] for _ in loads]
    for part in sorted(parts, key=order):
        total, writer = heappop(written)
        heappush(written, (total + size_bytes(part), writer))
        if writer == replica:
            shares[part[0]].append(part[1])
    return [_joined(slices) for slices in shares]


def _cut(load: Load, limit: float) -> list[slice]:
    count = max(1, min(load.rows, ceil(load.size_bytes / limit)))
    edges = [load.rows * n // count for n in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _joined(slices: list[slice]) -> list[slice]:
    """Joins slices: returns the same rows in as few slices as possible, in order."""
    joined: list[slice] = []
    for rows in sorted(slices, key=lambda rows: rows.start):
        if joined and joined[-1].stop == rows.start:
            joined[-1] = slice(joined[-1].start, rows.stop)
        else:
            joined.append(rows)
    return joined
