"""Questions about many rectangles, against the plain answer of marking every element."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import pytest

from rl_safe_workers.checkpoint.format.rectangles import Lookup, Rectangle, find_overlap, overlaps

PINWHEEL = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
"""A square that no straight cut takes apart."""


def _elements(rectangle: Rectangle) -> set[tuple[int, ...]]:
    return set(product(*(range(p, p + n) for p, n in zip(*rectangle, strict=True))))


def _random(rng: random.Random, *, dims: int, whole: int) -> Rectangle:
    offsets = tuple(rng.randrange(whole) for _ in range(dims))
    return offsets, tuple(rng.randint(0, whole - p) for p in offsets)


def _tiling(rng: random.Random, rectangle: Rectangle, depth: int) -> list[Rectangle]:
    """Cuts a rectangle at random; the parts do not overlap and leave nothing out."""
    offsets, sizes = rectangle
    dim = rng.randrange(len(sizes))
    if depth == 0 or sizes[dim] < 2:
        return [rectangle]
    cut = rng.randrange(1, sizes[dim])
    low = (*sizes[:dim], cut, *sizes[dim + 1 :])
    high = (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :])
    after = (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :])
    return _tiling(rng, (offsets, low), depth - 1) + _tiling(rng, (after, high), depth - 1)


@pytest.mark.parametrize("seed", range(200))
def test_an_overlap_is_found_exactly_when_two_share_an_element(seed: int) -> None:
    rng = random.Random(seed)
    group = [_random(rng, dims=rng.randint(1, 3), whole=6)]
    group += [_random(rng, dims=len(group[0][0]), whole=6) for _ in range(rng.randint(0, 4))]
    shared = any(_elements(a) & _elements(b) for i, a in enumerate(group) for b in group[:i])
    found = find_overlap(group)
    assert (found is not None) == shared
    assert found is None or _elements(found[0]) & _elements(found[1])


@pytest.mark.parametrize("seed", range(30))
def test_a_tiling_has_no_overlap_until_a_part_of_it_comes_twice(seed: int) -> None:
    rng = random.Random(seed)
    parts = _tiling(rng, ((0, 0, 0), (8, 8, 8)), depth=6)
    rng.shuffle(parts)
    assert sum(prod(sizes) for _, sizes in parts) == 8**3
    assert find_overlap(parts) is None
    assert find_overlap([*parts, rng.choice(parts)]) is not None


def test_a_pinwheel_has_no_overlap_and_a_wider_arm_has() -> None:
    assert find_overlap(PINWHEEL) is None
    assert find_overlap([((0, 0), (2, 2)), *PINWHEEL[1:]]) is not None


def test_an_overlap_across_a_gap_between_two_others_is_found() -> None:
    assert find_overlap([((0, 0), (10, 1)), ((2, 1), (2, 1)), ((5, 0), (2, 1))]) is not None


def test_scalars_overlap_only_when_there_are_two() -> None:
    assert find_overlap([((), ())]) is None
    assert find_overlap([((), ()), ((), ())]) is not None


def test_empty_rectangles_overlap_nothing() -> None:
    assert find_overlap([((0, 0), (2, 2)), ((1, 1), (0, 1)), ((1, 1), (0, 1))]) is None
    assert not overlaps(((0,), (4,)), ((2,), (0,)))


@pytest.mark.parametrize("seed", range(60))
def test_the_lookup_finds_all_that_is_touched_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    regular: list[Rectangle] = [((a, b, 0), (2, 3, 8)) for a in range(0, 8, 2) for b in range(0, 9, 3)]
    irregular = _tiling(rng, ((0, 0, 0), (8, 9, 8)), depth=5)
    parts = list(rng.choice([regular, irregular, [*regular, ((0, 0, 0), (0, 0, 0))]]))
    rng.shuffle(parts)
    lookup = Lookup(parts)
    for _ in range(10):
        needed = _random(rng, dims=3, whole=8)
        touched = [i for i, part in enumerate(parts) if _elements(part) & _elements(needed)]
        assert lookup.touching(needed) == touched


def test_the_lookup_of_a_scalar_and_of_nothing() -> None:
    assert Lookup([((), ())]).touching(((), ())) == [0]
    assert Lookup([]).touching(((0,), (1,))) == []
