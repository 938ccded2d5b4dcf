"""Whether actors that nobody waits for are still alive: a call would tell, and they are in none."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ray._private import state as ray_state

from rl_safe_workers.driver.actor_group import ActorRef, died
from rl_safe_workers.lifecycle import Phase

EVERY_S = 1.0
AT_ONCE = 32
"""Actors looked at each time; Ray's directory answers within a millisecond for each."""


class Vitals:
    """Looks at idle actors in turn, once in a while."""

    def __init__(self) -> None:
        """Has not looked yet."""
        self._looked_s, self._next = 0.0, 0

    def check(self, idle: Sequence[ActorRef], phase: Phase) -> None:
        """Looks at some of the actors, if it is time to.

        Args:
            idle: Those that are in no call.
            phase: What the others are in, for the error.

        Raises:
            RankError: If one of those looked at is dead.
        """
        if not idle or time.monotonic() - self._looked_s < EVERY_S:
            return
        self._looked_s = time.monotonic()
        for _ in range(min(AT_ONCE, len(idle))):
            actor = idle[self._next % len(idle)]
            self._next += 1
            # Ray's own function, since its public one needs the dashboard.
            if ray_state.actors(actor_id=actor.handle._actor_id.hex()).get("State") == "DEAD":
                raise died(actor, phase)
