"""Decides which rollout engines are lost, who takes their prompts, and when the engines in their place get prompts.

It asks nobody, and starts and ends nothing: that is its host's. Imports neither torch, Ray nor vLLM.

    starting    its process is not up yet
    waiting     it is up, with other weights than the trainers', or with weights that nobody has proved
    serving     it gets prompts
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rl_safe_workers.errors import Died, PhaseTimeoutError, RankError, RunError, Stopped, in_one_line
from rl_safe_workers.ranks import RankId, Role


class Standing(StrEnum):
    """The standing of an engine, or of the one in its place."""

    STARTING = "starting"
    WAITING = "waiting"
    SERVING = "serving"


@dataclass(slots=True, kw_only=True)
class EngineLoss:
    """An engine that was lost, and the time until the one in its place got prompts.

    Example: ``EngineLoss(engine=1, why="rollout rank 1 failed in phase rollout: the process died", lost_s=20.5)``
    """

    engine: int
    why: str
    """One line."""
    lost_s: float
    """Monotonic seconds when it was noticed."""
    back_s: float | None = None
    """Monotonic seconds when the one in its place began to serve; None if none has."""

    def __str__(self) -> str:
        back = "not back" if self.back_s is None else f"back after {self.back_s - self.lost_s:.1f} s"
        return f"{self.why} ({back})"


def lost_ranks(error: RunError) -> frozenset[RankId]:
    """Returns the rollout ranks that a failure means are lost: they died, or alone did not answer in time.

    An engine that has raised an error is not lost. It would raise again.
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
        """All engines start.

        Args:
            engines: Their number.
            most_lost: Number of engines that the run may lose.
            losses: Those lost so far; gets the later ones.
        """
        self._standing = dict.fromkeys(range(engines), Standing.STARTING)
        self._most_lost, self.losses = most_lost, losses
        self._lives = dict.fromkeys(range(engines), 0)
        """Counts, by engine, the engines that have been in its place before."""
        self._joint: dict[int, int] = {}
        """Life, by engine, of the members of the joint group."""
        self._returned: list[float] = []

    def _with(self, *standings: Standing) -> list[int]:
        return [engine for engine, standing in self._standing.items() if standing in standings]

    @property
    def serving(self) -> list[int]:
        """Engines that get prompts."""
        return self._with(Standing.SERVING)

    @property
    def up(self) -> list[int]:
        """Engines that take part in the next weight sync."""
        return self._with(Standing.WAITING, Standing.SERVING)

    @property
    def starting(self) -> list[int]:
        """Engines that do not answer yet."""
        return self._with(Standing.STARTING)

    @property
    def needs_proof(self) -> bool:
        """True if an engine that is up must be proved before it may serve."""
        return bool(self._with(Standing.WAITING))

    @property
    def needs_join(self) -> bool:
        """True if the members of the joint group are not the engines that are up."""
        return self._joint != self._lives_of(self.up)

    def _lives_of(self, engines: Iterable[int]) -> dict[int, int]:
        return {engine: self._lives[engine] for engine in engines}

    def lose(self, engine: int, error: RunError, *, now_s: float) -> EngineLoss:
        """Notes that an engine is lost, and that another one starts in its place.

        Args:
            engine: The engine.
            error: The failure by which that is known.
            now_s: Monotonic seconds.

        Raises:
            RunError: The failure, if the run may lose no more engines.
        """
        if len(self.losses) >= self._most_lost:
            raise error
        self._standing[engine] = Standing.STARTING
        self._lives[engine] += 1
        loss = EngineLoss(engine=engine, why=in_one_line(error), lost_s=now_s)
        self.losses.append(loss)
        return loss

    def started(self, engine: int) -> None:
        """Notes that an engine is up. The first in its place serves at once: it has the weights of the start."""
        self._standing[engine] = Standing.WAITING if self._lives[engine] else Standing.SERVING

    def joined(self, engines: Iterable[int]) -> None:
        """Notes the members of the joint group, after a join that has gone well."""
        self._joint = self._lives_of(engines)

    def proved(self, *, now_s: float) -> None:
        """Lets all engines that are up serve, after a weight sync that was proved.

        Args:
            now_s: Monotonic seconds.
        """
        for engine in self._with(Standing.WAITING):
            self._standing[engine] = Standing.SERVING
            for loss in self.losses:
                if loss.engine == engine and loss.back_s is None:
                    loss.back_s = now_s
                    self._returned.append(now_s - loss.lost_s)

    def returned(self) -> list[float]:
        """Returns the seconds from the loss of an engine on, of each that has begun to serve since the last call."""
        returned, self._returned = self._returned, []
        return returned

    def deal(self, prompts: Sequence[int]) -> list[tuple[int, range]]:
        """Shares prompts out among the engines that serve.

        Args:
            prompts: Indices of prompts within the step, ascending.

        Returns:
            An engine and consecutive prompts for it, each prompt once. An engine may have several such shares, and
            has at least one, which may be empty.
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
