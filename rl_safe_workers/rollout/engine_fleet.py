"""Decides which rollout engines are lost, which engines take their prompts, and when replacements get prompts.

This module only decides. Its caller asks, starts and ends the engines. Imports neither torch, Ray nor vLLM.

    starting    the engine's process is not up yet
    waiting     the engine is up, but its weights differ from the trainers', or are not proved
    serving     the engine gets prompts
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rl_safe_workers.errors import Died, PhaseTimeoutError, RankError, RunError, Stopped, in_one_line
from rl_safe_workers.ranks import RankId, Role


class EngineState(StrEnum):
    """The state of an engine, or of its replacement."""

    STARTING = "starting"
    WAITING = "waiting"
    SERVING = "serving"


@dataclass(slots=True, kw_only=True)
class EngineLoss:
    """The loss of an engine, and the time until its replacement got prompts.

    Example: ``EngineLoss(engine=1, why="rollout rank 1 failed in phase rollout: the process died", lost_s=20.5)``
    """

    engine: int
    why: str
    """One line."""
    lost_s: float
    """Monotonic seconds when the loss was noticed."""
    back_s: float | None = None
    """Monotonic seconds when the replacement began to serve; None if it has not."""

    def __str__(self) -> str:
        back = "not back" if self.back_s is None else f"back after {self.back_s - self.lost_s:.1f} s"
        return f"{self.why} ({back})"


def lost_ranks(error: RunError) -> frozenset[RankId]:
    """Returns the rollout ranks that a failure shows as lost: they died, or they missed a deadline and no trainer did.

    An engine that has raised an error does not count as lost, because a replacement would raise it again.
    """
    match error:
        case RankError(rank_id=RankId(role=Role.ROLLOUT) as rank_id, cause=Died() | Stopped()):
            return frozenset({rank_id})
        case PhaseTimeoutError(missing=missing) if all(one.role is Role.ROLLOUT for one in missing):
            return frozenset(missing)
    return frozenset()


class EngineFleet:
    """The engines of a run."""

    def __init__(self, engines: int, *, most_lost: int, losses: list[EngineLoss]) -> None:
        """Marks all engines as starting.

        Args:
            engines: Number of engines.
            most_lost: Number of engines that the run may lose.
            losses: The losses so far. Later losses are appended.
        """
        self._states = dict.fromkeys(range(engines), EngineState.STARTING)
        self._most_lost, self.losses = most_lost, losses
        self._lives = dict.fromkeys(range(engines), 0)
        """Number of replacements so far, by engine."""
        self._joint: dict[int, int] = {}
        """The members of the joint group: their number of replacements when they joined, by engine."""
        self._returned: list[float] = []

    def _in(self, *states: EngineState) -> list[int]:
        return [engine for engine, state in self._states.items() if state in states]

    @property
    def serving(self) -> list[int]:
        """Engines that get prompts."""
        return self._in(EngineState.SERVING)

    @property
    def up(self) -> list[int]:
        """Engines that take part in the next weight sync."""
        return self._in(EngineState.WAITING, EngineState.SERVING)

    @property
    def starting(self) -> list[int]:
        """Engines that do not answer yet."""
        return self._in(EngineState.STARTING)

    @property
    def needs_proof(self) -> bool:
        """True if an engine that is up must be proved before it may serve."""
        return bool(self._in(EngineState.WAITING))

    @property
    def needs_join(self) -> bool:
        """True if the joint group must be rebuilt, because its members are not exactly the engines that are up."""
        return self._joint != self._lives_of(self.up)

    def _lives_of(self, engines: Iterable[int]) -> dict[int, int]:
        return {engine: self._lives[engine] for engine in engines}

    def lose(self, engine: int, error: RunError, *, now_s: float) -> EngineLoss:
        """Records the loss of an engine, and that its replacement is starting.

        Args:
            engine: The engine.
            error: The failure that shows the loss.
            now_s: Monotonic seconds.

        Raises:
            RunError: The failure, if the run may lose no more engines.
        """
        if len(self.losses) >= self._most_lost:
            raise error
        self._states[engine] = EngineState.STARTING
        self._lives[engine] += 1
        loss = EngineLoss(engine=engine, why=in_one_line(error), lost_s=now_s)
        self.losses.append(loss)
        return loss

    def started(self, engine: int) -> None:
        """Notes that an engine is up. An original engine serves at once, because it has the starting weights."""
        self._states[engine] = EngineState.WAITING if self._lives[engine] else EngineState.SERVING

    def joined(self, engines: Iterable[int]) -> None:
        """Notes the members of the joint group after a successful join."""
        self._joint = self._lives_of(engines)

    def proved(self, *, now_s: float) -> None:
        """Marks all engines that are up as serving, after a proved weight sync.

        Args:
            now_s: Monotonic seconds.
        """
        for engine in self._in(EngineState.WAITING):
            self._states[engine] = EngineState.SERVING
            for loss in self.losses:
                if loss.engine == engine and loss.back_s is None:
                    loss.back_s = now_s
                    self._returned.append(now_s - loss.lost_s)

    def returned(self) -> list[float]:
        """Returns the seconds from loss to service of each replacement that has begun to serve since the last call."""
        returned, self._returned = self._returned, []
        return returned

    def deal(self, prompts: Sequence[int]) -> list[tuple[int, range]]:
        """Distributes prompts over the engines that serve.

        Args:
            prompts: Indices of prompts within the step, ascending.

        Returns:
            Pairs of an engine and consecutive prompts for it. Each prompt is in one pair. Each engine has at least one
            pair, perhaps with no prompts.
        """
        engines, shares = self.serving, []
        for number, engine in enumerate(engines):
            first, end = (len(prompts) * bound // len(engines) for bound in (number, number + 1))
            shares += [(engine, run) for run in _runs(prompts[first:end])]
        return shares


def _runs(indices: Sequence[int]) -> list[range]:
    """Splits ascending numbers into ranges without gaps. Returns one empty range for no numbers."""
    runs: list[range] = []
    for index in indices:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs or [range(0)]
