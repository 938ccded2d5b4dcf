"""A process that dies while nobody waits for it is noticed all the same."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from rl_safe_workers.diagnostics import vitals
from rl_safe_workers.diagnostics.vitals import Vitals


@dataclass
class Directory:
    """Tells who is dead, and remembers who was looked up."""

    dead: set[int] = field(default_factory=set)
    asked: list[int] = field(default_factory=list)

    def is_dead(self, process: int) -> bool:
        self.asked.append(process)
        return process in self.dead


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Directory:
    monkeypatch.setattr(vitals, "EVERY_S", 0.0)
    return Directory()


def test_a_dead_one_is_found(directory: Directory) -> None:
    directory.dead = {1}
    assert Vitals(directory.is_dead).first_dead([0, 1]) == 1
    assert Vitals(directory.is_dead).first_dead([0, 2]) is None


def test_many_are_looked_at_in_turn(directory: Directory) -> None:
    watch, processes = Vitals(directory.is_dead), list(range(vitals.AT_ONCE + 8))
    watch.first_dead(processes)
    assert len(directory.asked) == vitals.AT_ONCE
    watch.first_dead(processes)
    assert set(directory.asked) == set(processes)


def test_nobody_is_asked_too_often_nor_if_nobody_is_idle(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Vitals(directory.is_dead)
    watch.first_dead([])
    assert directory.asked == []
    watch.first_dead([0])
    monkeypatch.setattr(vitals, "EVERY_S", 60.0)
    watch.first_dead([0])
    assert directory.asked == [0]
