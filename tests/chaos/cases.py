"""The fault matrix: its cells, the runs of them, and what must be true of how those end."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role
from tests.chaos.plan import ABRUPT, OF_A_RANK, TAKES_PART, Fault, Kind, Point
from tests.integration.runs import SMALL

PHASES = (
    Phase.GROUPS,
    Phase.BOOTSTRAP,
    Phase.CONVERT,
    Phase.LOAD,
    Phase.ROLLOUT,
    Phase.TRAIN,
    Phase.SYNC,
    Phase.SAVE,
    Phase.TEARDOWN,
)
RANKS = ((Role.TRAINER, 0), (Role.TRAINER, 1), (Role.ROLLOUT, 0))
TRAINERS = 2

FIRST_STEP, LAST_STEP = 1, 3
"""Every run goes on from a checkpoint of the first step, so that each phase is entered and there is one to lose."""
OCCURRENCE = {Phase.ROLLOUT: 2, Phase.TRAIN: 2, Phase.SYNC: 3, Phase.SAVE: 2}
"""Stay at which a fault strikes in phases that come again: the last step's. The first sync sends the loaded weights."""

TIMEOUT_S = {Kind.STALL: 6.0, Kind.LATE: 6.0}
"""Timeouts of the phase that the fault strikes in; short where a test waits for it."""
GENEROUS_TIMEOUT_S = 20.0
SLACK_S = 10.0
"""How much longer than the phase's timeout a run may take from the fault to its end."""

POINT = {Kind.LATE: Point.BOUNDARY, Kind.EXIT: Point.BOUNDARY}
"""Where a fault strikes; otherwise inside the phase. Runs that start again have it the other way round."""

CONFIG = (
    *SMALL,
    "trainer.save_freq=1",
    f"trainer.total_training_steps={LAST_STEP}",
    "rl_safe.checkpoint.digest=true",
    "rl_safe.checkpoint.keep_last=0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell of the matrix."""

    kind: Kind
    phase: Phase
    role: Role
    rank: int
    restarts: bool = False
    """True if the run is to start again after it."""

    def __str__(self) -> str:
        return f"{self.phase}-{self.role}{self.rank}-{self.column.replace(', ', '-')}"

    @property
    def row(self) -> tuple[Phase, Role, int]:
        """Its place in the table."""
        return self.phase, self.role, self.rank

    @property
    def column(self) -> str:
        """Its place in the table."""
        return f"{self.kind}, restart" if self.restarts else str(self.kind)

    @property
    def timeout_s(self) -> float:
        """Timeout of the phase."""
        return TIMEOUT_S.get(self.kind, GENEROUS_TIMEOUT_S)

    def fault(self, folder: Path, number: int = 0) -> Fault:
        """Makes the fault that strikes in the run of this case.

        Args:
            folder: For the marks.
            number: How many faults have struck before it. From the second attempt on a run begins with its last step.
        """
        at_boundary = (POINT.get(self.kind) is Point.BOUNDARY) != self.restarts
        occurrence = OCCURRENCE.get(self.phase, 1)
        return Fault(
            kind=self.kind,
            role=self.role,
            rank=self.rank,
            phase=self.phase,
            point=Point.BOUNDARY if at_boundary else Point.INSIDE,
            occurrence=occurrence - 1 if number and occurrence > 1 else occurrence,
            number=number,
            folder=str(folder),
        )

    def overrides(self) -> list[str]:
        """Overrides of the recipe."""
        return [*CONFIG, "trainer.resume_mode=auto", f"rl_safe.timeouts.{self.phase}={self.timeout_s}"]

    def is_named_by(self, error: str) -> bool:
        """Returns True if an error message names the rank of the fault, before any other, and the phase."""
        if f"phase {self.phase}" not in error:
            return False
        who = rf"{self.role.noun} {self.rank}\b"
        groups = f"the {self.role}s" + ("|(the )?training world|[A-Z_]+ \\[" if self.role is Role.TRAINER else "")
        missing = rf"\brank {self.rank} of ({groups})"
        named = re.search(f"{who}|{missing}", error)
        return named is not None and re.search(r"\brank \d", error[: named.start()]) is None

    @property
    def recorded_steps(self) -> list[int]:
        """Steps whose metrics are written before the fault."""
        if self.phase in (Phase.SAVE, Phase.TEARDOWN):
            return [FIRST_STEP + 1, LAST_STEP]
        return [FIRST_STEP + 1] if self.phase in OCCURRENCE else []

    @property
    def saved_steps(self) -> set[int]:
        """Steps of which the newest complete checkpoint may be, without a restart."""
        if self.phase is Phase.TEARDOWN:
            return {LAST_STEP}
        if self.phase not in OCCURRENCE:
            return {FIRST_STEP}
        # A rank that takes no part does not keep the others from their save.
        is_saved = self.phase is Phase.SAVE and self.role is Role.ROLLOUT
        return {LAST_STEP - 1, LAST_STEP} if is_saved else {LAST_STEP - 1}


def all_cases() -> list[Case]:
    """Every cell that can be: nothing but an abrupt end can happen to a rank that takes no part in the phase."""
    return [
        Case(kind=kind, phase=phase, role=role, rank=rank, restarts=restarts)
        for phase in PHASES
        for role, rank in RANKS
        for restarts, kinds in ((False, OF_A_RANK), (True, (Kind.KILL, Kind.RAISE)))
        for kind in kinds
        if kind in ABRUPT or phase in TAKES_PART[role]
    ]


QUICK = frozenset(
    {
        Case(kind=Kind.RAISE, phase=Phase.TRAIN, role=Role.TRAINER, rank=1),
        Case(kind=Kind.KILL, phase=Phase.SYNC, role=Role.ROLLOUT, rank=0),
    }
)
"""Cases that run without ``--chaos``; a stall is in ``tests/integration/test_hang.py``."""
QUICK_CHAIN = (Case(kind=Kind.KILL, phase=Phase.TRAIN, role=Role.TRAINER, rank=1, restarts=True),)
"""The like, of those that start again."""


def chains() -> list[tuple[Case, ...]]:
    """The cells that start again, as runs in which one fault follows the other, an attempt later each time."""
    cells = [case for case in all_cases() if case.restarts]
    by_phase = {phase: tuple(case for case in cells if case.phase is phase) for phase in PHASES}
    # After a teardown there is nothing left to be done, and another fault has no occasion.
    alone = by_phase.pop(Phase.TEARDOWN)
    return [*by_phase.values(), *((case,) for case in alone)]
