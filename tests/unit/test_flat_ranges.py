from __future__ import annotations

from itertools import combinations_with_replacement
from math import prod

import numpy as np
import pytest

from rl_safe_workers.checkpoint.format.flat_ranges import Rectangle, rectangles, row_major

SHAPES = [(), (1,), (7,), (1, 5), (5, 1), (3, 4), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]


def _elements(rectangle: Rectangle, shape: tuple[int, ...]) -> np.ndarray:
    array = np.arange(prod(shape)).reshape(shape)
    place = tuple(slice(a, a + n) for a, n in zip(rectangle.offset, rectangle.shape, strict=True))
    return array[place].reshape(-1)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_range_is_covered_once_and_in_order(shape) -> None:
    for start, stop in combinations_with_replacement(range(prod(shape) + 1), 2):
        covered = [e for r in rectangles(start, stop, shape) for e in _elements(r, shape)]
        assert covered == list(range(start, stop))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rectangle_is_contiguous_where_it_says_it_starts(shape) -> None:
    for start, stop in combinations_with_replacement(range(prod(shape) + 1), 2):
        for rectangle in rectangles(start, stop, shape):
            flat = np.arange(rectangle.start, rectangle.start + prod(rectangle.shape))
            assert (_elements(rectangle, shape) == flat).all()
            view = np.lib.stride_tricks.as_strided(
                flat, rectangle.shape, [flat.itemsize * stride for stride in row_major(rectangle.shape)]
            )
            assert (view.reshape(-1) == flat).all()


@pytest.mark.parametrize("shape", [s for s in SHAPES if s])
def test_there_are_never_more_than_twice_the_axes(shape) -> None:
    ranges = combinations_with_replacement(range(prod(shape) + 1), 2)
    assert max(len(rectangles(a, b, shape)) for a, b in ranges) <= 2 * len(shape) - 1


def test_whole_rows_are_one_rectangle() -> None:
    assert rectangles(0, 12, (3, 4)) == (Rectangle(0, (0, 0), (3, 4)),)
    assert rectangles(4, 12, (3, 4)) == (Rectangle(4, (1, 0), (2, 4)),)


def test_a_range_within_a_row_is_one_rectangle() -> None:
    assert rectangles(5, 7, (3, 4)) == (Rectangle(5, (1, 1), (1, 2)),)


def test_an_empty_range_has_no_rectangles() -> None:
    assert rectangles(5, 5, (3, 4)) == ()
