"""Finds memory that is lost in every cycle of a run, and says which owner loses how much. Pure: it reads nothing.

    growth = MemoryGrowth()
    for step in ...:
        for leak in growth.cycle({"host memory": rss_bytes, "tensors on the device": allocated_bytes}):
            logger.warning("%s", leak)

A leak goes on evenly, to where its owner has not been before. That tells it from what is well: growth while a run warms
up becomes less, a plateau has one step, a cache falls back, and noise goes both ways.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

METRIC = "rl_safe/memory_growth_mib"
"""Name of the metric: MiB that the owner with the largest leak loses in a step; 0 if none was found."""
_MIB = 2**20
FLOOR_BYTES = 8 * _MIB
"""Smallest growth in a cycle that counts."""
FIRST_CYCLES = 9
"""Cycles before the first judgement: a cache that falls back within them is not taken for a leak."""
_NEWEST = 5
"""Newest cycles, in which a leak shows."""
_WARM_UP = 2
"""First cycles, whose peak says nothing: weights are loaded, and libraries build their tables."""
_HISTORY = 40
"""Cycles that are remembered of an owner."""
_LARGEST_STEP = 0.5
"""Largest share of the growth in one cycle."""
_WARM_STEPS, _SETTLED = 5, 14
"""A first step of more than so many later ones is a warm-up that may go on, until so many cycles are known."""
_LARGEST_FALL = 0.25
"""Largest fall that is remembered, as a share of the growth: what has fallen like that falls again."""
_NOISES = 7.0
"""How many times the growth in the newest cycles must exceed the noise of one cycle."""
_MAD = 1.4826
"""Ratio of the standard deviation to the median deviation of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Leak:
    """An owner that grows in every cycle.

    Example: ``str(Leak("host memory", 20 * 2**20, 3 * 2**30)) == "host memory grows by 20 MiB in each step, and has
    3.00 GiB now"``
    """

    owner: str
    bytes_per_cycle: float
    bytes_now: int

    def __str__(self) -> str:
        rate, now = self.bytes_per_cycle / _MIB, self.bytes_now / 2**30
        return f"{self.owner} grows by {rate:.0f} MiB in each step, and has {now:.2f} GiB now"


class MemoryGrowth:
    """Judges the memory of each owner, once a cycle."""

    def __init__(self) -> None:
        """Knows no owner yet."""
        self._sizes: dict[str, deque[int]] = {}
        self._cycles: dict[str, int] = {}
        self._leaks: dict[str, Leak] = {}

    def cycle(self, sizes: Mapping[str, int]) -> list[Leak]:
        """Takes in the sizes at the end of a cycle, always at the same point of it.

        Args:
            sizes: Bytes by owner. A new owner may come at any time.

        Returns:
            Leaks that are new: each owner is named once.
        """
        found = []
        for owner, size in sizes.items():
            kept = self._sizes.setdefault(owner, deque(maxlen=_HISTORY))
            self._cycles[owner] = number = self._cycles.get(owner, 0) + 1
            if number > _WARM_UP:
                kept.append(size)
            if owner not in self._leaks and number >= FIRST_CYCLES and (rate := _lost_in_each(list(kept))) is not None:
                self._leaks[owner] = leak = Leak(owner, rate, size)
                found.append(leak)
        return found

    @property
    def worst(self) -> float:
        """Bytes that the owner with the largest leak loses in a cycle, as it was when it was named; 0 without one."""
        return max((leak.bytes_per_cycle for leak in self._leaks.values()), default=0.0)


def _lost_in_each(sizes: Sequence[int]) -> float | None:
    """Returns the bytes that an owner loses in each cycle; None if it is well, or nobody can tell."""
    before, newest = sizes[:-_NEWEST], sizes[-_NEWEST:]
    steps = _steps(newest)
    grown = newest[-1] - newest[0]
    # The median over all pairs (Theil and Sen) does not mind a single cycle that is off.
    rate = statistics.median((newest[j] - newest[i]) / (j - i) for i, j in combinations(range(_NEWEST), 2))
    is_leak = (
        rate >= FLOOR_BYTES
        and max(steps) <= _LARGEST_STEP * grown
        and (len(sizes) >= _SETTLED or sizes[1] - sizes[0] <= _WARM_STEPS * rate)
        and -min(_steps(sizes)) <= _LARGEST_FALL * grown
        and min(newest) > max(before, default=0)
        and grown >= _NOISES * _noise(sizes)
    )
    return rate if is_leak else None


def _steps(sizes: Sequence[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise(sizes)]


def _noise(sizes: Sequence[int]) -> float:
    """Returns the standard deviation of one size around its trend, in bytes, as all cycles that are known show it."""
    steps = _steps(sizes)
    middle = statistics.median(steps)
    return float(_MAD * statistics.median(abs(step - middle) for step in steps) / 2**0.5)
