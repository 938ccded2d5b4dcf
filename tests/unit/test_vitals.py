"""An actor that dies while nobody waits for it is noticed all the same."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from rl_safe_workers.driver import vitals
from rl_safe_workers.driver.actor_group import ActorRef
from rl_safe_workers.errors import RankError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role


@dataclass
class Directory:
    """Ray's list of actors, and who was looked up."""

    dead: set[str]
    asked: list[str]

    def actors(self, *, actor_id: str) -> dict[str, str]:
        self.asked.append(actor_id)
        return {"State": "DEAD" if actor_id in self.dead else "ALIVE"}


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Directory:
    directory = Directory(dead=set(), asked=[])
    monkeypatch.setattr(vitals, "ray_state", directory)
    monkeypatch.setattr(vitals, "EVERY_S", 0.0)
    return directory


def rollouts(count: int) -> list[ActorRef]:
    def handle(rank: int) -> SimpleNamespace:
        return SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: f"rollout{rank}"))

    return [ActorRef(role=Role.ROLLOUT, rank=rank, handle=handle(rank)) for rank in range(count)]


def test_a_dead_one_is_named_with_the_phase_that_the_others_are_in(directory: Directory) -> None:
    directory.dead = {"rollout1"}
    with pytest.raises(RankError, match="rollout rank 1 failed in phase train: the process died"):
        vitals.Vitals().check(rollouts(2), Phase.TRAIN)


def test_many_are_looked_at_in_turn(directory: Directory) -> None:
    watch, actors = vitals.Vitals(), rollouts(vitals.AT_ONCE + 8)
    watch.check(actors, Phase.TRAIN)
    assert len(directory.asked) == vitals.AT_ONCE
    watch.check(actors, Phase.TRAIN)
    assert set(directory.asked) == {f"rollout{rank}" for rank in range(len(actors))}


def test_nobody_is_asked_too_often_nor_if_nobody_is_idle(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = vitals.Vitals()
    watch.check([], Phase.TRAIN)
    assert directory.asked == []
    watch.check(rollouts(1), Phase.TRAIN)
    monkeypatch.setattr(vitals, "EVERY_S", 60.0)
    watch.check(rollouts(1), Phase.TRAIN)
    assert directory.asked == ["rollout0"]
