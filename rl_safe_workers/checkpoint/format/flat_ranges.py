"""Ranges of a row-major array as rectangles.

The distributed optimizer gives each data-parallel rank a range of a parameter's elements, which may begin and end
anywhere. Checkpoints consist of rectangles. A range of a matrix is at most three rectangles: the rest of its first row,
the whole rows after it, and the beginning of its last row.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from rl_safe_workers.checkpoint.format.rectangles import Index


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle of a row-major array whose elements are contiguous in that array."""

    start: int
    """Position of its first element in the flattened array."""
    offset: Index
    """Place of its first element in the array."""
    shape: Index


def row_major(shape: Index) -> Index:
    """Strides in elements of a contiguous array.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def rectangles(start: int, stop: int, shape: Index) -> tuple[Rectangle, ...]:
    """Cuts a range of a flattened array into rectangles, at most ``2 * len(shape) - 1`` of them, in order.

    Args:
        start: First element of the range.
        stop: Element after its last one; an empty range has no rectangles.
        shape: Shape of the array, row-major.

    >>> [(r.offset, r.shape) for r in rectangles(2, 13, (4, 4))]
    [((0, 2), (1, 2)), ((1, 0), (2, 4)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return ()
    if len(shape) < 2:
        return (Rectangle(start, (start,) * len(shape), (stop - start,) * len(shape)),)
    row = prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:  # begins and ends within one row
        return _in_row(end_whole, start, stop, shape)
    head = _in_row(first_whole - 1, start, first_whole * row, shape)
    tail = _in_row(end_whole, end_whole * row, stop, shape)
    if first_whole == end_whole:
        return (*head, *tail)
    whole = Rectangle(first_whole * row, (first_whole, *(0 for _ in shape[1:])), (end_whole - first_whole, *shape[1:]))
    return (*head, whole, *tail)


def _in_row(index: int, start: int, stop: int, shape: Index) -> tuple[Rectangle, ...]:
    """The rectangles of a range that lies within one index of the first axis."""
    base = index * prod(shape[1:])
    inner = rectangles(start - base, stop - base, shape[1:])
    return tuple(Rectangle(base + r.start, (index, *r.offset), (1, *r.shape)) for r in inner)
