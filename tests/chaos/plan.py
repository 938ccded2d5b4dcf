"""The faults of a run: one in each attempt, in one rank, at one place of one phase."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role

VARIABLE = "RL_SAFE_TEST_FAULT"
"""Holds the faults, as JSON, in the environment of the command of `tests.chaos.command`."""


class Kind(StrEnum):
    """How a rank fails."""

    KILL = "kill"
    """SIGKILL."""
    RAISE = "raise"
    """An exception."""
    STALL = "stall"
    """It never goes on."""
    LATE = "late"
    """It goes on, some seconds after the phase's timeout."""
    EXIT = "exit"
    """The process ends with status 0 and without teardown."""
    STOP = "stop"
    """SIGSTOP."""
    FILL = "fill"
    """Nothing at all happens to the rank, but the disk of `Fault.disk` is full from now on."""


OF_A_RANK = (Kind.KILL, Kind.RAISE, Kind.STALL, Kind.LATE, Kind.EXIT)
"""Faults of the matrix; the others are in `tests.chaos.test_machine_faults`."""


class Point(StrEnum):
    """Where in a phase."""

    BOUNDARY = "boundary"
    """On entering it, before the other ranks know that this one has come."""
    INSIDE = "inside"
    """In the middle of its work; see `tests.chaos.workers` for where that is."""


TAKES_PART = {
    Role.TRAINER: frozenset(Phase) - {Phase.ROLLOUT, Phase.REWARD},
    Role.ROLLOUT: frozenset({Phase.START, Phase.JOINT, Phase.ROLLOUT, Phase.SYNC, Phase.TEARDOWN}),
}
"""In a phase of the others a rank only waits to be called."""
ABRUPT = frozenset({Kind.KILL, Kind.EXIT, Kind.STOP})
"""Faults that can happen to a rank that only waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. It strikes once, also if the run is started again, and only after those before it have struck.

    Example: ``Fault(kind=Kind.KILL, role=Role.TRAINER, rank=1, phase=Phase.SAVE, folder="/tmp/t1")``
    """

    kind: Kind
    role: Role
    rank: int
    """Within its role."""
    phase: Phase
    point: Point = Point.INSIDE
    occurrence: int = 1
    """Which stay in the phase, counted from 1 by each rank of the attempt."""
    number: int = 0
    """Its place among the faults of the run."""
    folder: str
    """Folder of the marks by which the processes of a run tell each other, and the test, of events."""
    disk: str = ""
    """For FILL: a folder on that disk."""

    @property
    def finds_it_idle(self) -> bool:
        """True if the rank takes no part in the phase: the fault strikes while the others are in it."""
        return self.phase not in TAKES_PART[self.role]

    @property
    def struck(self) -> Path:
        """Holds the Unix time at which the fault struck; made just before."""
        return Path(self.folder, f"struck_{self.number}")

    @property
    def again(self) -> Path:
        """Holds the Unix time at which some rank of a later attempt entered the phase."""
        return Path(self.folder, f"again_{self.number}")

    @property
    def due(self) -> Path:
        """Made by rank 0 of the other role, for a rank that takes no part in the phase."""
        return Path(self.folder, f"due_{self.number}")


def to_json(*faults: Fault) -> str:
    """Faults as text."""
    return json.dumps([asdict(fault) for fault in faults])


def from_json(text: str) -> tuple[Fault, ...]:
    """The faults of a text that `to_json` has made."""
    kinds: dict[str, Callable[[Any], Any]] = {"kind": Kind, "role": Role, "phase": Phase, "point": Point}
    return tuple(
        Fault(**{name: kinds[name](value) if name in kinds else value for name, value in fields.items()})
        for fields in json.loads(text)
    )
