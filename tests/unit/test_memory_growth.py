"""Memory that is lost in every cycle is named with its owner and rate; what is well is never named."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest

from rl_safe_workers.diagnostics.memory_growth import Leak, MemoryGrowth
from tests.unit import memory_shapes

MIB = 2**20
OWNERS = ("host memory", "/dev/shm", "tensors on the device", "device memory outside torch")
LOST_MIB = 20


def _warming_up(rng: random.Random, cycle: int) -> float:
    return 800 * (1 - math.exp(-1.5 * cycle)) + rng.gauss(0, 2)


def _plateaus(rng: random.Random, cycle: int) -> float:
    return sum(size for at, size in ((3, 90), (14, 250), (15, 40), (90, 600)) if cycle >= at) + rng.gauss(0, 1)


def _sawtooth(rng: random.Random, cycle: int) -> float:
    return 60 * (cycle % 7) + rng.gauss(0, 4)


def _noise(rng: random.Random, cycle: int) -> float:
    return rng.gauss(0, 80) + (500 if rng.random() < 0.05 else 0)


CLEAN = (_warming_up, _sawtooth, _plateaus, _noise)


def _cycles(
    seed: int, lasting: int, shapes: tuple[Callable[[random.Random, int], float], ...]
) -> Iterator[dict[str, int]]:
    rng = random.Random(seed)
    for cycle in range(lasting):
        sizes = (20_000 + shape(rng, cycle) for shape in shapes)
        yield dict(zip(OWNERS, (int(size * MIB) for size in sizes), strict=True))


def _all_sides(rng: random.Random, cycle: int) -> float:
    return _warming_up(rng, cycle) + _sawtooth(rng, cycle) + _plateaus(rng, cycle)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shapes", [CLEAN, (_all_sides, *CLEAN[1:])], ids=["each", "together"])
def test_two_hundred_cycles_that_are_well_give_no_alarm(
    seed: int, shapes: tuple[Callable[[random.Random, int], float], ...]
) -> None:
    growth = MemoryGrowth()
    assert [leak for sizes in _cycles(seed, 200, shapes) for leak in growth.cycle(sizes)] == []
    assert growth.worst == 0


def _long_warm_up(rng: random.Random) -> Iterator[float]:
    size, lasts, noise = rng.choice((100, 1000, 5000)), rng.uniform(0.3, 2), rng.choice((0.5, 2, 5, 20, 60))
    return (40_000 + size * (1 - math.exp(-cycle / lasts)) + rng.gauss(0, noise) for cycle in range(200))


def _long_plateaus(rng: random.Random) -> Iterator[float]:
    steps = [(at, rng.uniform(20, 600)) for at in rng.sample(range(4, 200, 8), 4)]
    for cycle, warm in enumerate(_long_warm_up(rng)):
        yield warm + sum(size for at, size in steps if cycle >= at)


@pytest.mark.parametrize("shape", [_long_warm_up, _long_plateaus])
def test_three_hundred_runs_that_warm_up_in_their_own_way_give_no_alarm(
    shape: Callable[[random.Random], Iterator[float]],
) -> None:
    found = []
    for seed in range(300):
        growth = MemoryGrowth()
        sizes = shape(random.Random(seed))
        found += [(seed, leak) for size in sizes for leak in growth.cycle({"host memory": int(size * MIB)})]
    assert found == []


@pytest.mark.parametrize("kind", memory_shapes.SHAPES)
def test_two_hundred_runs_that_are_well_in_each_way_give_no_alarm(kind: str) -> None:
    noises = memory_shapes.NOISES_MIB
    runs = [(seed, noises[seed % len(noises)]) for seed in range(200)]
    assert [run for run in runs if memory_shapes.first_leak(kind, run[0], noise_mib=run[1]) is not None] == []


def test_a_longer_warm_up_is_seldom_named() -> None:
    (kind,) = memory_shapes.LONG_WARM_UP
    found = [seed for seed in range(300) if memory_shapes.first_leak(kind, seed, noise_mib=2) is not None]
    assert len(found) <= 300 // 25


@pytest.mark.parametrize("kind", ["normal noise", "uniform noise"])
def test_a_thousand_leaks_in_little_noise_are_all_named_before_the_tenth(kind: str) -> None:
    for seed in range(memory_shapes.RUNS):
        found = memory_shapes.first_leak(kind, seed, noise_mib=2, lost_mib=memory_shapes.LOST_MIB)
        assert found is not None, seed
        assert found[0] < 10, seed
        assert found[1].bytes_per_cycle / MIB == pytest.approx(memory_shapes.LOST_MIB, rel=0.15)


@pytest.mark.parametrize("kind", ["normal noise", "uniform noise", "one step up", "plateaus", "a ramp of 5 steps"])
@pytest.mark.parametrize("noise_mib", [5.0, 8.0])
def test_a_leak_in_more_noise_is_named_later(kind: str, noise_mib: float) -> None:
    for seed in range(100):
        assert memory_shapes.first_leak(kind, seed, noise_mib=noise_mib, lost_mib=memory_shapes.LOST_MIB) is not None


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("seed", range(10))
def test_what_is_lost_in_each_cycle_is_named_once_before_the_tenth(owner: str, seed: int) -> None:
    growth = MemoryGrowth()
    found: list[tuple[int, Leak]] = []
    for cycle, sizes in enumerate(_cycles(seed, 50, (_warming_up,) * len(OWNERS)), 1):
        sizes[owner] += LOST_MIB * cycle * MIB
        found += [(cycle, leak) for leak in growth.cycle(sizes)]
    ((cycle, leak),) = found
    assert cycle < 10
    assert leak.owner == owner
    assert leak.bytes_per_cycle / MIB == pytest.approx(LOST_MIB, rel=0.2)
    assert growth.worst == leak.bytes_per_cycle


def test_an_owner_that_comes_back_to_where_it_has_been_is_well() -> None:
    growth, size = MemoryGrowth(), 9000
    for step in ([-15] * 10 + [20] * 7) * 6:
        size += step
        assert growth.cycle({"host memory": size * MIB}) == []


def test_two_owners_that_leak_are_both_named() -> None:
    growth = MemoryGrowth()
    names = {
        leak.owner
        for cycle in range(12)
        for leak in growth.cycle({"a": 30 * cycle * MIB, "b": (10_000 + 9 * cycle) * MIB, "c": 7 * cycle * MIB})
    }
    assert names == {"a", "b"}  # c grows by less than the floor


def test_an_owner_that_comes_later_is_judged_by_its_own_cycles() -> None:
    growth = MemoryGrowth()
    found = []
    for cycle in range(60):
        sizes = {"old": 5 * MIB} | ({"new": 20 * cycle * MIB} if cycle >= 40 else {})
        found += [(cycle, leak.owner) for leak in growth.cycle(sizes)]
    assert found == [(48, "new")]


def test_a_leak_reads_as_a_sentence() -> None:
    leak = Leak("host memory", 20.4 * MIB, 3 * 2**30)
    assert str(leak) == "host memory grows by 20 MiB in each step, and has 3.00 GiB now"
