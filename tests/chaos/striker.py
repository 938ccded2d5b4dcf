"""Lets a fault strike in the process that it is meant for. Works from the phase events and from marks inside phases."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rl_safe_workers.config import TimeoutsConfig
from rl_safe_workers.lifecycle import Lifecycle, Phase, Role
from tests.chaos.plan import Fault, Kind, Point

LATE_S = 3.0
"""How much later than the phase's timeout a late rank goes on."""
MESSAGE = "no luck\non this rank"
NOTICED_S = 2.5
"""How long a phase goes on after the death of an idle rank, which the driver looks for once a second."""
_POLL_S = 0.01
_PATIENCE_S = 20.0


class Striker:
    """Counts the phases of one process, and strikes when the fault is due there."""

    def __init__(self, fault: Fault, *, role: Role, rank: int, timeouts: TimeoutsConfig) -> None:
        self.role, self.rank = role, rank
        self._fault, self._timeouts = fault, timeouts
        self._entered: Counter[Phase] = Counter()
        # In a run that was started again the fault has struck already.
        self._is_over = fault.struck.exists()
        self._is_victim = (role, rank) == (fault.role, fault.rank)
        if self._is_victim and fault.finds_it_idle and not self._is_over:
            threading.Thread(target=self._strike_when_due, daemon=True).start()

    def entered(self, phase: Phase) -> None:
        """To be called on entering a phase, before anything of it is done."""
        self._entered[phase] += 1
        if not self._is_due(phase):
            return
        if self._is_victim and self._fault.point is Point.BOUNDARY:
            self._strike()
        elif self._fault.finds_it_idle and self.role is not self._fault.role and self.rank == 0:
            self._fault.due.touch()
            _wait_for(self._fault.struck.exists)
            time.sleep(NOTICED_S)  # a phase of a real run lasts

    def inside(self, phase: Phase) -> None:
        """To be called at the marked point inside a phase."""
        if self._is_due(phase) and self._is_victim and self._fault.point is Point.INSIDE:
            self._strike()

    def _is_due(self, phase: Phase) -> bool:
        fault = self._fault
        return not self._is_over and (phase, self._entered[phase]) == (fault.phase, fault.occurrence)

    def _strike_when_due(self) -> None:
        while not self._fault.due.exists():
            time.sleep(_POLL_S)
        self._strike()

    def _strike(self) -> None:
        self._is_over = True
        # Whole at once: someone waits for it to exist.
        (written := self._fault.struck.with_suffix(".new")).write_text(str(time.time()))
        written.rename(self._fault.struck)
        match self._fault.kind:
            case Kind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.RAISE:
                raise RuntimeError(MESSAGE)
            case Kind.STALL:
                time.sleep(3600)
            case Kind.LATE:
                time.sleep(getattr(self._timeouts, self._fault.phase) + LATE_S)
            case Kind.EXIT:
                os._exit(0)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


class ChaosLifecycle(Lifecycle):
    """A lifecycle in which the fault can strike where phases are observed. What an observer raises is only logged."""

    def __init__(self, striker: Striker) -> None:
        super().__init__(role=striker.role, rank=striker.rank)
        self._striker = striker

    @contextmanager
    def enter(self, phase: Phase, *, since_s: float | None = None) -> Iterator[None]:
        with super().enter(phase, since_s=since_s):
            self._striker.entered(phase)
            yield

    def invalidate(self, phase: Phase) -> None:
        super().invalidate(phase)
        if self.current is Phase.GROUPS:  # the groups are there, and need a bootstrap
            self._striker.inside(Phase.GROUPS)
