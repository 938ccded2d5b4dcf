"""Simulated memory of one owner over the cycles of a run, in MiB: what is well, with noise of every kind.

``python -m tests.unit.memory_shapes`` prints how many of 1000 runs of each kind are named, clean and with a leak.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable

from rl_safe_workers.diagnostics.memory_growth import Leak, MemoryGrowth

MIB = 2**20
BASE_MIB = 20_000
CYCLES = 200
LEAKING_CYCLES = 50
LOST_MIB = 20.0
NOISES_MIB = (2.0, 3.0, 5.0, 8.0)
LOUD_MIB = (20.0, 60.0)
"""Noise under which clean runs are tried, too."""
RUNS = 1000

Shape = Callable[[random.Random], Callable[[int], float]]
"""Makes a run of its kind: a function of the cycle, which is counted from 0 and asked for in order."""


def _flat(rng: random.Random) -> Callable[[int], float]:
    return lambda cycle: 0.0


def _spikes(rng: random.Random) -> Callable[[int], float]:
    """One cycle in twenty has more, mostly a little."""
    return lambda cycle: rng.expovariate(1 / 200) if rng.random() < 0.05 else 0.0


def _step(rng: random.Random) -> Callable[[int], float]:
    at, size = rng.randrange(CYCLES), rng.uniform(20, 1000)
    return lambda cycle: size if cycle >= at else 0.0


def _ramp(rng: random.Random) -> Callable[[int], float]:
    size = rng.choice((100, 1000, 5000))
    return lambda cycle: size * min(1.0, cycle / 5)


def _lessening(longest: float) -> Shape:
    def make(rng: random.Random) -> Callable[[int], float]:
        size, lasts = rng.choice((100, 1000, 5000)), rng.uniform(0.3, longest)
        return lambda cycle: size * (1 - math.exp(-cycle / lasts))

    return make


def _sawtooth(rng: random.Random) -> Callable[[int], float]:
    """An allocator that gives back every 2 to 8 cycles."""
    period, rise = rng.randint(2, 8), rng.uniform(10, 100)
    begin = rng.randrange(period)
    return lambda cycle: rise * ((cycle + begin) % period)


def _collected(rng: random.Random) -> Callable[[int], float]:
    """Garbage that is collected now and then."""
    rise, left, size = rng.uniform(10, 100), rng.randint(2, 7), 0.0

    def at(cycle: int) -> float:
        nonlocal left, size
        left -= 1
        left, size = (rng.randint(2, 7), 0.0) if left == 0 else (left, size + rise)
        return size

    return at


def _saves(rng: random.Random) -> Callable[[int], float]:
    """Every fifth cycle saves; the first save makes buffers that stay."""
    size, stays = rng.uniform(50, 2000), rng.uniform(0, 500)
    return lambda cycle: (size if cycle % 5 == 4 else 0.0) + (stays if cycle >= 4 else 0.0)


def _plateaus(rng: random.Random) -> Callable[[int], float]:
    steps = [(at, rng.uniform(20, 600)) for at in rng.sample(range(4, CYCLES, 8), 4)]
    return lambda cycle: sum(size for at, size in steps if cycle >= at)


SHAPES: dict[str, Shape] = {
    "normal noise": _flat,
    "uniform noise": _flat,
    "spikes": _spikes,
    "one step up": _step,
    "plateaus": _plateaus,
    "a ramp of 5 steps": _ramp,
    "a warm-up with a time constant of up to 2 steps": _lessening(2),
    "sawtooth": _sawtooth,
    "garbage collection": _collected,
    "a save every 5 steps": _saves,
}
"""All have normal noise but the second."""
LONG_WARM_UP = {"a warm-up with a time constant of up to 5 steps": _lessening(5)}


def first_leak(kind: str, seed: int, *, noise_mib: float, lost_mib: float = 0.0) -> tuple[int, Leak] | None:
    """Runs one owner until it is named.

    Args:
        kind: Of `SHAPES` or `LONG_WARM_UP`.
        seed: Of the run.
        noise_mib: Standard deviation of a size.
        lost_mib: Lost in each cycle.

    Returns:
        The cycle, counted from 1, and what was named; None if nothing was.
    """
    rng, growth = random.Random(f"{kind} {seed}"), MemoryGrowth()
    shape = {**SHAPES, **LONG_WARM_UP}[kind](rng)
    widest = 3**0.5 * noise_mib  # of a uniform distribution
    for cycle in range(LEAKING_CYCLES if lost_mib else CYCLES):
        noise = rng.uniform(-widest, widest) if kind == "uniform noise" else rng.gauss(0, noise_mib)
        size = BASE_MIB + shape(cycle) + noise + lost_mib * cycle
        for leak in growth.cycle({"host memory": int(size * MIB)}):
            return cycle + 1, leak
    return None


def _main() -> None:
    for kind in (*SHAPES, *LONG_WARM_UP):
        told = []
        for noise_mib in (*NOISES_MIB, *LOUD_MIB):
            clean = [first_leak(kind, seed, noise_mib=noise_mib) for seed in range(RUNS)]
            told.append(f"{noise_mib:g} MiB: {sum(one is not None for one in clean)}")
        sys.stdout.write(f"{kind}, clean, of {RUNS} named: {', '.join(told)}\n")
        told = []
        for noise_mib in NOISES_MIB:
            leaking = [first_leak(kind, seed, noise_mib=noise_mib, lost_mib=LOST_MIB) for seed in range(RUNS)]
            early = [
                leak.bytes_per_cycle / MIB for one in leaking if one is not None and one[0] < 10 for leak in one[1:]
            ]
            rates = f" at {min(early):.0f} to {max(early):.0f} MiB" if early else ""
            ever = sum(one is not None for one in leaking)
            told.append(f"{noise_mib:g} MiB: {len(early)}{rates}, {ever} in all")
        sys.stdout.write(f"{kind}, {LOST_MIB:g} MiB lost, of {RUNS} named before step 10: {'; '.join(told)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
