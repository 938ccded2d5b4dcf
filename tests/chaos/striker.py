"""Lets a fault strike in the process that it is meant for. Works from the phase events and from marks inside phases."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rl_safe_workers.config import TimeoutsConfig
from rl_safe_workers.lifecycle import Lifecycle, Phase
from rl_safe_workers.ranks import Role
from tests.chaos.plan import Fault, Kind, Point

LATE_S = 3.0
"""How much later than the phase's timeout a late rank goes on."""
MESSAGE = "no luck\non this rank"
NOTICED_S = 2.5
"""How long a phase goes on after the death of an idle rank, which the driver looks for once a second."""
FILLER = "filler"
"""Name of the file that `fill` makes."""
_BLOCK_BYTES = 4096
_POLL_S = 0.01
_PATIENCE_S = 20.0


class Striker:
    """Counts the phases of one process, and strikes when the attempt's fault is due there."""

    def __init__(self, faults: Sequence[Fault], *, role: Role, rank: int, timeouts: TimeoutsConfig) -> None:
        self.role, self.rank, self._timeouts = role, rank, timeouts
        self._entered: Counter[Phase] = Counter()
        past = [fault for fault in faults if fault.struck.exists()]
        self._past, self._fault = past[-1:], next(iter(faults[len(past) :]), None)
        if self._fault is not None and self._fault.finds_it_idle and self._is_victim(self._fault):
            threading.Thread(target=self._strike_when_due, args=(self._fault,), daemon=True).start()

    def entered(self, phase: Phase) -> None:
        """To be called on entering a phase, before anything of it is done."""
        self._entered[phase] += 1
        for past in self._past:
            if phase is past.phase and not past.again.exists():
                _write_now(past.again)
        fault = self._due(phase)
        if fault is None:
            return
        if self._is_victim(fault) and fault.point is Point.BOUNDARY:
            self._strike(fault)
        elif fault.finds_it_idle and self.role is not fault.role and self.rank == 0:
            fault.due.touch()
            _wait_for(fault.struck.exists)
            time.sleep(NOTICED_S)  # a phase of a real run lasts

    def inside(self, phase: Phase) -> None:
        """To be called at the marked point inside a phase."""
        fault = self._due(phase)
        if fault is not None and self._is_victim(fault) and fault.point is Point.INSIDE:
            self._strike(fault)

    def _is_victim(self, fault: Fault) -> bool:
        return (self.role, self.rank) == (fault.role, fault.rank)

    def _due(self, phase: Phase) -> Fault | None:
        fault = self._fault
        is_due = fault is not None and (phase, self._entered[phase]) == (fault.phase, fault.occurrence)
        return fault if is_due else None

    def _strike_when_due(self, fault: Fault) -> None:
        while not fault.due.exists():
            time.sleep(_POLL_S)
        self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        self._fault = None
        _write_now(fault.struck)
        match fault.kind:
            case Kind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.RAISE:
                raise RuntimeError(MESSAGE)
            case Kind.STALL:
                time.sleep(3600)
            case Kind.LATE:
                time.sleep(getattr(self._timeouts, fault.phase) + LATE_S)
            case Kind.EXIT:
                os._exit(0)
            case Kind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Kind.FILL:
                fill(Path(fault.disk))


def fill(folder: Path) -> None:
    """Leaves no byte free on the disk that a folder is on."""
    with (folder / FILLER).open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(_BLOCK_BYTES)):
            pass


def _write_now(file: Path) -> None:
    # Whole at once: someone may wait for it to exist.
    (written := file.with_suffix(f".{os.getpid()}")).write_text(str(time.time()))
    written.rename(file)


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
