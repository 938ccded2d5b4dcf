"""Finds memory leaks: an owner that grows in every cycle of a run, and by how much. Pure: it reads nothing.

    growth = MemoryGrowth()
    for step in ...:
        for leak in growth.cycle({"host memory": rss_bytes, "tensors on the device": allocated_bytes}):
            logger.warning("%s", leak)

The newer two thirds of an owner's cycles are judged, 15 at most, in three parts. The owner leaks if both rises from
part to part are about equal, and each part has larger sizes than all cycles before it. The growth must be large
compared with the noise and with every earlier fall.

Healthy memory does not look like that: growth while a run warms up slows down, a plateau has one rise, a cache falls
back, and noise goes both ways.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

METRIC = "rl_safe/memory_growth_mib"
"""Name of the metric: MiB that the owner with the largest leak loses in a step; 0 if none was found."""
_MIB = 2**20
FLOOR_BYTES = 8 * _MIB
"""Smallest growth in a cycle that counts."""
FIRST_CYCLES = 9
"""Number of cycles before the first judgement. A cache that falls back within them does not look like a leak."""
_HISTORY = 40
"""Cycles that are remembered of an owner."""
_NEWEST = 15
"""Most cycles in which a leak shows."""
_ALIKE = 2 / 3
"""Smallest ratio of the two rises of a leak."""
_LARGEST_FALL = 0.1
"""Largest fall that still allows a leak, as a share of the growth: memory that fell more is likely to fall again."""
_NOISES = 10.0
"""How many times the growth must exceed the noise of one cycle."""


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
        self._leaks: dict[str, Leak] = {}

    def cycle(self, sizes: Mapping[str, int]) -> list[Leak]:
        """Judges the sizes at the end of a cycle. Call it at the same point of each cycle.

        Args:
            sizes: Bytes by owner. A new owner may come at any time.

        Returns:
            The new leaks. Each owner is reported only once.
        """
        found = []
        for owner, size in sizes.items():
            kept = self._sizes.setdefault(owner, deque(maxlen=_HISTORY))
            kept.append(size)
            if (
                owner not in self._leaks
                and len(kept) >= FIRST_CYCLES
                and (rate := _lost_in_each(list(kept))) is not None
            ):
                self._leaks[owner] = leak = Leak(owner, rate, size)
                found.append(leak)
        return found

    @property
    def worst(self) -> float:
        """The largest leak so far, in bytes per cycle, as measured when it was reported; 0 without a leak."""
        return max((leak.bytes_per_cycle for leak in self._leaks.values()), default=0.0)


def _lost_in_each(sizes: Sequence[int]) -> float | None:
    """Returns the bytes that an owner leaks in each cycle; None if there is no leak, or too little is known."""
    taken = min(_NEWEST, len(sizes) - len(sizes) // 3)
    third = taken // 3
    newest = sizes[-taken:]
    thirds = newest[:third], newest[third:-third], newest[-third:]
    if any(max(earlier) >= min(later) for earlier, later in pairwise((sizes[:-taken], *thirds))):
        return None
    rises = _steps([statistics.fmean(each) for each in thirds])
    grown = sum(rises)
    rate = grown / (taken - third)
    noise = statistics.stdev(_steps(newest)) / 2**0.5
    is_leak = (
        rate >= FLOOR_BYTES
        and min(rises) >= _ALIKE * max(rises)
        and -min(_steps(sizes)) <= _LARGEST_FALL * grown
        and grown >= _NOISES * noise
    )
    return rate if is_leak else None


def _steps(levels: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(levels)]
