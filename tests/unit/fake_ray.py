"""Ray over a clock of its own, actors that answer after a while, and what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError

from rl_safe_workers.driver.cluster.actor_group import ActorRef
from rl_safe_workers.driver.cluster.actors import Reply
from rl_safe_workers.errors import Awaited, Cause, PhaseTimeoutError, Raised, RankError
from rl_safe_workers.lifecycle import Phase, PhaseEvent
from rl_safe_workers.ranks import Role, trainer_id, trainer_ids

TIMEOUT_S = 60.0


@dataclass
class FakeRay:
    """``ray.wait`` and ``ray.get`` over answers that come at given times of a clock of its own.

    It is the clock, too: waiting is the only thing that takes time.
    """

    now_s: float = 1000.0
    answers: list[tuple[float, Reply | RayError]] = field(default_factory=list)
    """When each answer comes and what it is; the index is the reference."""
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    is_there: bool = True
    """False once this process has left Ray."""

    def is_initialized(self) -> bool:
        return self.is_there

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def _ready(self, refs: Sequence[int]) -> list[int]:
        return [ref for ref in refs if self.answers[ref][0] <= self.now_s]

    def wait(self, refs: list[int], *, num_returns: int = 1, timeout: float) -> tuple[list[int], list[int]]:
        assert 1 <= num_returns <= len(refs)
        deadline_s = self.now_s + timeout
        while len(self._ready(refs)) < num_returns and self.now_s < deadline_s:
            later = [self.answers[ref][0] for ref in refs if self.answers[ref][0] > self.now_s]
            self.now_s = min([*later, deadline_s])
        done = self._ready(refs)[:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: int) -> Reply:
        at_s, answer = self.answers[ref]
        assert at_s <= self.now_s, "get would block"
        if isinstance(answer, RayError):
            raise answer
        return answer

    def answer(self, after_s: float, what: Reply | RayError) -> int:
        self.answers.append((self.now_s + after_s, what))
        return len(self.answers) - 1


@dataclass(eq=False)
class FakeHandle:
    """An actor whose ``call`` is answered after a while."""

    ray: FakeRay
    after_s: float
    what: Reply | RayError

    @property
    def call(self) -> FakeHandle:
        return self

    def remote(self, *args: Any) -> int:
        self.ray.calls.append(args)
        return self.ray.answer(self.after_s, self.what)


def trainers(ray: FakeRay, *answers: tuple[float, Reply | RayError]) -> list[ActorRef]:
    return [
        ActorRef(role=Role.TRAINER, rank=rank, handle=FakeHandle(ray, *answer)) for rank, answer in enumerate(answers)
    ]


def rollouts(ray: FakeRay, *answers: tuple[float, Reply | RayError]) -> list[ActorRef]:
    return [
        ActorRef(role=Role.ROLLOUT, rank=rank, handle=FakeHandle(ray, *answer)) for rank, answer in enumerate(answers)
    ]


def value(number: int) -> Reply:
    return Reply(value=number)


def event(rank: int, *, ok: bool = True) -> PhaseEvent:
    return PhaseEvent(phase=Phase.TRAIN, role=Role.TRAINER, rank=rank, start_s=1.0, end_s=2.0, ok=ok)


def failure(rank: int, *, at_s: float, cause: Cause | None = None) -> Reply:
    error = RankError(
        rank_id=trainer_id(rank), phase="train", cause=cause or Raised(), text="ValueError: x", trace="", raised_at=at_s
    )
    return Reply(error=error, events=[event(rank, ok=False)])


def timed_out(*missing: int) -> Reply:
    world = Awaited("training world", frozenset(trainer_ids(range(3))))
    return Reply(
        error=PhaseTimeoutError(
            phase="train",
            awaited=world,
            missing=trainer_ids(missing),
            waited_s=TIMEOUT_S,
            setting="rl_safe.timeouts.train",
        )
    )
