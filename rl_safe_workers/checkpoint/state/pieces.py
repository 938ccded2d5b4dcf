"""Pieces: the parts of global tensors that a rank holds, few and large.

The cost of a torch_dist save depends on its number of sharded tensors, not on its bytes. Megatron makes one for each
expert, matrix and optimizer state. Here neighbours become one piece: small local experts of a layer and matrix are one
chunk ``[num_local_experts, ...]`` of the global tensor ``[num_experts, ...]``. Megatron's own saves have the same
global tensor under the same key, so each side can read the other's checkpoints.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add, attrgetter
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from rl_safe_workers.checkpoint.format.rectangles import Index
from rl_safe_workers.compat.torch_copies import copy_each


@dataclass(frozen=True, slots=True)
class Part:
    """One of the sharded tensors that a piece is made of."""

    number: int
    """Index in the list of sharded tensors."""
    start: Index
    """Place of its first element in the piece."""
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
    """Megatron's replica id: an integer or a tuple, only zeros for the main replica."""
    parts: tuple[Part, ...]
    is_stack: bool = False
    """True if each part is one row of the first axis, in order, as with experts."""

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Length of the first axis, along which the piece can be cut; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def alone(self, part: Part) -> Piece:
        """Returns a part as a piece of its own."""
        offset = tuple(map(add, self.offset, part.start))
        parts = (replace(part, start=(0,) * len(part.shape)),)
        return replace(self, offset=offset, shape=part.shape, parts=parts, is_stack=False)

    def tensor(self, tensors: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
        """Returns rows of the piece along its first axis: a view if it has one contiguous part, else a new tensor.

        Args:
            tensors: Data of the sharded tensors by `Part.number`.
            rows: With explicit start and stop.
        """
        if len(self.parts) == 1:
            whole = tensors[self.parts[0].number].detach()
            whole = whole.view(self.shape) if whole.is_contiguous() else whole.reshape(self.shape)
            return whole[rows].contiguous() if self.shape else whole
        if self.is_stack:
            # One call stacks all experts: a copy_ for each would take ten times as long.
            return _stack([tensors[part.number] for part in self.parts[rows]], self.shape[1:])
        whole = tensors[self.parts[0].number].new_empty(self.shape)
        self.gather(tensors, whole)
        return whole[rows]

    def gather(self, tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """Copies the parts into a tensor of the piece's shape."""
        for part in self.parts:
            _region(into, part).copy_(tensors[part.number].detach().view(part.shape))

    def is_one_block(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns True if the piece is one contiguous tensor, so that a load needs no other buffer."""
        return len(self.parts) == 1 and tensors[self.parts[0].number].is_contiguous()

    def buffer(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns a tensor of the piece's shape to read into: a single contiguous part itself, else a new tensor."""
        if self.is_one_block(tensors):
            return tensors[self.parts[0].number].detach().view(self.shape)
        # The bytes are read on the host. A stack of parts then goes to the device once.
        return torch.empty(self.shape, dtype=self.dtype)

    def scatter(self, tensors: Sequence[torch.Tensor], loaded: torch.Tensor) -> None:
        """Copies a filled `buffer` into the parts."""
        if self.is_one_block(tensors):
            return
        if self.is_stack:
            targets = [tensors[part.number].detach() for part in self.parts]
            copy_each(targets, [row.view(t.shape) for row, t in zip(loaded, targets, strict=True)])
            return
        for part in self.parts:
            tensors[part.number].detach().view(part.shape).copy_(_region(loaded, part))


def _region(whole: torch.Tensor, part: Part) -> torch.Tensor:
    return whole[tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))]


@torch.no_grad()
def _stack(rows: list[torch.Tensor], shape: Index) -> torch.Tensor:
    joined = torch.cat(rows) if rows[0].dim() == 1 + len(shape) else torch.stack(rows)
    return joined.view(-1, *shape)


@dataclass(frozen=True, slots=True)
class Split:
    """A Megatron state dict, taken apart."""

    tensors: list[ShardedTensor]
    objects: list[ShardedObject]
    common: dict[str, Any]
    """The rest of the dict, the same on every rank. Dicts and lists that became empty are left out."""


def split(state: dict[str, Any]) -> Split:
    """Separates sharded tensors and objects from the common state, in the dict's order. Builds factories."""
    found = Split([], [], {})
    for key, value in state.items():
        if (rest := _split(value, found)) is not _APART:
            found.common[key] = rest
    return found


_APART = object()
"""Marks a value that does not belong to the common state."""


def _split(value: Any, found: Split) -> Any:
    # This is by far the most frequent case: tens of thousands of values.
    if type(value) is ShardedTensor:
        found.tensors.append(value)
        return _APART
    if isinstance(value, dict):
        kept = {k: rest for k, v in value.items() if (rest := _split(v, found)) is not _APART}
        return kept if kept or not value else _APART
    if isinstance(value, list):
        left = [rest for v in value if (rest := _split(v, found)) is not _APART]
        return left if left or not value else _APART
    if isinstance(value, ShardedTensorFactory):
        _split(value.build(), found)
    elif isinstance(value, ShardedTensor):
        found.tensors.append(value)
    elif isinstance(value, ShardedObject):
        found.objects.append(value)
    elif not isinstance(value, LocalNonpersistentObject):
        return value
    return _APART


signature = attrgetter("key", "global_offset", "local_shape", "dtype", "replica_id", "global_shape")
"""The fields of a sharded tensor that decide its piece; equal signatures give equal pieces."""


def coalesce(shards: Sequence[ShardedTensor], *, most_bytes: float = math.inf) -> list[Piece]:
    """Joins neighbours of one global tensor, axis by axis, into few, large pieces.

    Sharded tensors join if they have the same key, dtype and replica id, and lie side by side along one axis.

    Args:
        shards: The sharded tensors.
        most_bytes: Limit for the bytes of a joined piece. A sharded tensor above the limit is a piece of its own.
    """
    by_tensor: defaultdict[Any, list[Piece]] = defaultdict(list)
    for number, shard in enumerate(shards):
        by_tensor[shard.key, shard.dtype, shard.replica_id].append(_to_piece(number, shard))
    return [joined for group in by_tensor.values() for joined in _join(group, most_bytes)]


def _to_piece(number: int, shard: ShardedTensor) -> Piece:
    shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    part = Part(number, (0,) * len(shape), shape)
    return Piece(
        shard.key, shard.dtype, tuple(shard.global_shape), tuple(shard.global_offset), shape, shard.replica_id, (part,)
    )


def _join(pieces: list[Piece], most_bytes: float) -> list[Piece]:
    # Begin with the last axis, so that halves of a gated layer become whole rows before the rows become experts.
    for axis in reversed(range(len(pieces[0].shape))):
        if len(pieces) == 1:
            break
        lines: defaultdict[Any, list[Piece]] = defaultdict(list)
        for piece in pieces:
            offset, shape = piece.offset, piece.shape
            lines[offset[:axis], offset[axis + 1 :], shape[:axis], shape[axis + 1 :]].append(piece)
        pieces = [joined for line in lines.values() for joined in _join_line(line, axis, most_bytes)]
    return pieces


def _join_line(line: list[Piece], axis: int, most_bytes: float) -> Iterator[Piece]:
    line.sort(key=lambda piece: piece.offset[axis])
    run, size_bytes = [line[0]], line[0].size_bytes
    for piece in line[1:]:
        size_bytes += piece.size_bytes
        if run[-1].offset[axis] + run[-1].shape[axis] == piece.offset[axis] and size_bytes <= most_bytes:
            run.append(piece)
        else:
            yield _join_run(run, axis)
            run, size_bytes = [piece], piece.size_bytes
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
