"""Plans which parts of its state a rank writes. A rank plans alone, and keeps the plan while the structure stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

from rl_safe_workers.checkpoint.format.rectangles import Index
from rl_safe_workers.checkpoint.save.balance import Load, share_out
from rl_safe_workers.checkpoint.save.holdings import Entry, Holdings
from rl_safe_workers.checkpoint.state.pieces import Piece, coalesce, signature

EXPERT_MARK = ".experts."
"""Substring of the keys of expert parameters, which are replicated over the expert data-parallel group."""
JOINED_BYTES = 2**20
"""Largest chunk in bytes that joins several sharded tensors. A larger one is a chunk of its own. Megatron-core reads
a whole chunk for each sharded tensor that it fills from it. With 64 experts of 1.5 MiB in one chunk, its load took
80 times as long as from its own save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Number of ranks that hold each tensor whose replica id is ``(0, 0, rank in the data-parallel group)``."""

    dense: int = 1
    """Size of the data-parallel group with context parallelism."""
    expert: int = 1
    """Size of the expert data-parallel group."""
    optimizer: bool = False
    """True if optimizer state is replicated like the parameters; a DistributedOptimizer's is not."""

    def of(self, key: str) -> int:
        """Returns the number of ranks that hold the tensor with a key."""
        if "optimizer." in key and not self.optimizer:
            return 1
        return self.expert if EXPERT_MARK in key else self.dense


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parts that a rank writes. A plan is valid while the structure of the rank's state stays the same."""

    signature: list[tuple[Any, ...]]
    object_keys: list[str]
    writes: list[tuple[Piece, slice]]
    """Pieces in the order of the file, each with the rows of its first axis to write."""
    holdings: Holdings
    digest: str
    size_bytes: int
    largest_bytes: int
    """Bytes of the largest write."""

    def fits(self, tensors: Sequence[ShardedTensor], object_keys: Sequence[str]) -> bool:
        """Returns True if these tensors and objects have the structure that the plan was made for."""
        return (
            len(tensors) == len(self.signature)
            and object_keys == self.object_keys
            and all(map(eq, map(signature, tensors), self.signature))
        )


def make_plan(tensors: list[ShardedTensor], object_keys: list[str], replicas: Replicas) -> Plan:
    """Decides, alone, what this rank writes.

    Args:
        tensors: Megatron's sharded tensors, also those that other replicas write.
        object_keys: Unique keys of the objects that this rank writes.
        replicas: Number of ranks that hold each tensor.
    """
    pieces = coalesce(tensors, most_bytes=JOINED_BYTES)
    writes = sorted(_writes(pieces, replicas), key=lambda write: write[0].key)
    sizes = [piece.size_bytes * (rows.stop - rows.start) // piece.rows for piece, rows in writes]
    holdings = Holdings(_entries(pieces, writes), object_keys)
    return Plan(
        signature=list(map(signature, tensors)),
        object_keys=object_keys,
        writes=writes,
        holdings=holdings,
        digest=holdings.digest(),
        size_bytes=sum(sizes),
        largest_bytes=max(sizes, default=0),
    )


def _writes(pieces: list[Piece], replicas: Replicas) -> list[tuple[Piece, slice]]:
    writes: list[tuple[Piece, slice]] = []
    for members, count, replica in _replica_sets(pieces, replicas):
        loads = [Load(key=p.key, offset=p.offset, size_bytes=p.size_bytes, rows=p.rows) for p in members]
        for piece, share in zip(members, share_out(loads, replicas=count, replica=replica), strict=True):
            writes += [(piece, rows) for rows in share]
    return writes


def _entries(pieces: list[Piece], writes: list[tuple[Piece, slice]]) -> list[Entry]:
    """Returns the rank's tensors by key, with the chunks that it writes, in the order of writing."""
    of_key = {piece.key: piece for piece in pieces}
    chunks: dict[str, list[tuple[Index, Index]]] = {key: [] for key in of_key}
    for piece, rows in writes:
        chunks[piece.key].append(_chunk(piece, rows))
    return [Entry(key, str(of_key[key].dtype), of_key[key].global_shape, chunks[key]) for key in sorted(of_key)]


def _replica_sets(pieces: list[Piece], replicas: Replicas) -> list[tuple[list[Piece], int, int]]:
    """Groups pieces by the set of ranks that hold them. Returns pieces, number of replicas and this rank's replica."""
    # Different groups hold dense and expert tensors, even if the groups have one size.
    sets: dict[tuple[bool, int, int], list[Piece]] = {}
    for piece in pieces:
        count, replica_id, is_expert = replicas.of(piece.key), piece.replica_id, EXPERT_MARK in piece.key
        if isinstance(replica_id, tuple) and len(replica_id) == 3 and not any(replica_id[:2]) and replica_id[2] < count:
            sets.setdefault((is_expert, count, replica_id[2]), []).append(piece)
        elif is_main_replica(replica_id):
            sets.setdefault((is_expert, 1, 0), []).append(piece)
    return [(members, count, replica) for (_, count, replica), members in sets.items()]


def _chunk(piece: Piece, rows: slice) -> tuple[Index, Index]:
    if not piece.shape:
        return (), ()
    return (piece.offset[0] + rows.start, *piece.offset[1:]), (rows.stop - rows.start, *piece.shape[1:])
