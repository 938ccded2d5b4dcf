"""Pieces: the parts of global tensors that a rank holds, few and large.

The cost of a torch_dist save is its number of sharded tensors, not its bytes, and Megatron makes one per expert,
matrix and optimizer state. Here neighbours become one piece: all local experts of a layer and matrix are one chunk
``[num_local_experts, ...]`` of the global tensor ``[num_experts, ...]`` that Megatron's own saves have, under the
same key, so that each reads the other's checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from rl_safe_workers.checkpoint.rectangles import Index


@dataclass(frozen=True, slots=True)
class Part:
    """One of the sharded tensors that a piece is made of."""

    number: int
    """Its place in the list of sharded tensors."""
    start: Index
    """Where its first element lies in the piece."""
    shape: Index
    """With a leading 1 for each axis that Megatron prepends."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a global tensor.

    Example: experts 64 to 127 of a layer's ``linear_fc1``, of 128: ``global_shape=(128, 32, 16)``,
    ``offset=(64, 0, 0)``, ``shape=(64, 32, 16)``, 64 parts of shape ``(1, 32, 16)``.
    """

    key: str
    dtype: torch.dtype
    global_shape: Index
    offset: Index
    shape: Index
    replica_id: Any
    """Megatron's: an integer or a tuple, all zero for the main replica."""
    parts: tuple[Part, ...]
    is_stack: bool = False
    """Whether each part is one row of the first axis, as an expert is, in order."""

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Length of its first axis, along which it can be cut; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def tensor(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """Rows of the piece along its first axis: a view of the one part if it is contiguous, else a new tensor.

        Args:
            tensors: Data of the sharded tensors by `Part.number`.
            rows: With explicit start and stop.
        """
        if len(self.parts) == 1:
            whole = tensors[self.parts[0].number].detach()
            whole = whole.view(self.shape) if whole.is_contiguous() else whole.reshape(self.shape)
            return whole[rows].contiguous() if self.shape else whole
        if self.is_stack:
            # One call for all experts: a copy_ for each costs ten times as much.
            return _stack([tensors[part.number] for part in self.parts[rows]], self.shape[1:])
        whole = tensors[self.parts[0].number].new_empty(self.shape)
        self.gather(tensors, whole)
        return whole[rows]

    def gather(self, tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Copies the parts into a tensor of the piece's shape."""
        for part in self.parts:
            _region(into, part).copy_(tensors[part.number].detach().view(part.shape))

    def buffer(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A tensor of the piece's shape to read into: the one part itself if it is contiguous, else a new one."""
        first = tensors[self.parts[0].number].detach()
        if len(self.parts) == 1 and first.is_contiguous():
            return first.view(self.shape)
        # What is read is on the host; a stack of parts goes to the device once.
        return torch.empty(self.shape, dtype=self.dtype)

    def scatter(self, tensors: Sequence[torch.Tensor], loaded: torch.Tensor) -> None:
        """Copies what `buffer` gave, filled, into the parts."""
        if len(self.parts) == 1 and tensors[self.parts[0].number].is_contiguous():
            return
        if self.is_stack:
            targets = [tensors[part.number].detach() for part in self.parts]
            torch._foreach_copy_(targets, [row.view(t.shape) for row, t in zip(loaded, targets, strict=True)])
            return
        for part in self.parts:
            tensors[part.number].detach().view(part.shape).copy_(_region(loaded, part))


def _region(whole: torch.Tensor, part: Part) -> torch.Tensor:
    return whole[tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))]


@torch.no_grad()
def _stack(rows: list[torch.Tensor], shape: Index) -> torch.Tensor:
    joined = torch.cat(rows) if rows[0].dim() == 1 + len(shape) else torch.stack(rows)
    return joined.view(-1, *shape)


def shards_in(state: Any) -> Iterator[ShardedTensor | ShardedObject]:
    """Yields what of a Megatron state dict is stored apart, factories built; order is the dict's."""
    if isinstance(state, dict):
        for value in state.values():
            yield from shards_in(value)
    elif isinstance(state, list):
        for value in state:
            yield from shards_in(value)
    elif isinstance(state, (ShardedTensor, ShardedObject)):
        yield state
    elif isinstance(state, ShardedTensorFactory):
        yield from shards_in(state.build())


def common_in(state: Any) -> Any:
    """The same dict without what is stored apart, and without what that leaves empty: what every rank holds alike."""
    if isinstance(state, dict):
        kept = {k: common_in(v) for k, v in state.items() if not _is_apart(v)}
        return {k: v for k, v in kept.items() if not _is_emptied(v, state[k])}
    if isinstance(state, list):
        return [kept for v in state if not _is_apart(v) and not _is_emptied(kept := common_in(v), v)]
    return state


def _is_emptied(kept: Any, before: Any) -> bool:
    return isinstance(before, (dict, list)) and bool(before) and not kept


def _is_apart(value: Any) -> bool:
    return isinstance(value, (ShardedTensor, ShardedObject, ShardedTensorFactory, LocalNonpersistentObject))


def signature(shards: Iterable[ShardedTensor]) -> Iterator[tuple[Any, ...]]:
    """What of sharded tensors decides how they are cut into pieces; equal signatures give equal pieces."""
    return ((s.key, s.global_offset, s.local_shape, s.dtype, s.replica_id, s.global_shape) for s in shards)


def coalesce(shards: Sequence[ShardedTensor]) -> list[Piece]:
    """Joins neighbours of one global tensor, axis by axis, into as few pieces as possible.

    Sharded tensors join if they have the same key, dtype and replica id, and differ in their place along one axis
    only, without a gap.
    """
    by_tensor: defaultdict[Any, list[Piece]] = defaultdict(list)
    for number, shard in enumerate(shards):
        by_tensor[shard.key, shard.dtype, shard.replica_id].append(_to_piece(number, shard))
    return [joined for group in by_tensor.values() for joined in _join(group)]


def _to_piece(number: int, shard: ShardedTensor) -> Piece:
    shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    part = Part(number, (0,) * len(shape), shape)
    return Piece(
        shard.key, shard.dtype, tuple(shard.global_shape), tuple(shard.global_offset), shape, shard.replica_id, (part,)
    )


def _join(pieces: list[Piece]) -> list[Piece]:
    # From the last axis, so that the halves of a gated layer become whole rows before rows become experts.
    for axis in reversed(range(len(pieces[0].shape))):
        if len(pieces) == 1:
            break
        lines: defaultdict[Any, list[Piece]] = defaultdict(list)
        for piece in pieces:
            offset, shape = piece.offset, piece.shape
            lines[offset[:axis], offset[axis + 1 :], shape[:axis], shape[axis + 1 :]].append(piece)
        pieces = [joined for line in lines.values() for joined in _join_line(line, axis)]
    return pieces


def _join_line(line: list[Piece], axis: int) -> Iterator[Piece]:
    line.sort(key=lambda piece: piece.offset[axis])
    run = [line[0]]
    for piece in line[1:]:
        if run[-1].offset[axis] + run[-1].shape[axis] == piece.offset[axis]:
            run.append(piece)
        else:
            yield _join_run(run, axis)
            run = [piece]
    yield _join_run(run, axis)


def _join_run(run: list[Piece], axis: int) -> Piece:
    first = run[0]
    if len(run) == 1:
        return first
    parts: list[Part] = []
    length = 0
    for piece in run:
        for part in piece.parts:
            start = part.start
            parts.append(Part(part.number, (*start[:axis], start[axis] + length, *start[axis + 1 :]), part.shape))
        length += piece.shape[axis]
    shape = (*first.shape[:axis], length, *first.shape[axis + 1 :])
    is_stack = axis == 0 and all(part.shape == (1, *shape[1:]) for part in parts)
    return Piece(
        first.key, first.dtype, first.global_shape, first.offset, shape, first.replica_id, tuple(parts), is_stack
    )
