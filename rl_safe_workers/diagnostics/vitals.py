"""Checks that idle processes are still alive. Nobody calls them, so no failed call would show that one has died."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

EVERY_S = 1.0
"""Seconds between two looks."""
AT_ONCE = 32
"""Processes looked at each time. Ray's directory answers within a millisecond for each."""


class Vitals(Generic[T]):
    """Looks at idle processes in turn, a few at a time.

    Example: ``Vitals(lambda process: process.poll() is not None).first_dead(processes)``
    """

    def __init__(self, is_dead: Callable[[T], bool]) -> None:
        """Has not looked yet.

        Args:
            is_dead: Returns True if a process has ended. Should answer at once.
        """
        self._is_dead = is_dead
        self._looked_s, self._next = 0.0, 0

    def first_dead(self, idle: Sequence[T]) -> T | None:
        """Looks at some of the processes if a look is due. Returns the first dead one, or None.

        Args:
            idle: The processes that nobody waits for.
        """
        if not idle or time.monotonic() - self._looked_s < EVERY_S:
            return None
        self._looked_s = time.monotonic()
        for _ in range(min(AT_ONCE, len(idle))):
            one = idle[self._next % len(idle)]
            self._next += 1
            if self._is_dead(one):
                return one
        return None
