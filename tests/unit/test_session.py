"""A session's wait after a failure: who is given up, and who is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from rl_safe_workers.config import RunConfig
from rl_safe_workers.driver import session as session_module
from rl_safe_workers.driver.cluster import actor_group
from rl_safe_workers.driver.cluster.actor_group import PendingCalls, start_calls
from rl_safe_workers.driver.session import Session
from rl_safe_workers.errors import RankError, RunError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role
from tests.unit.fake_ray import FakeRay, rollouts, value

pytestmark = pytest.mark.usefixtures("without_messages")
R1 = RankId(Role.ROLLOUT, 1)


class FakeCluster:
    """A cluster of a run with its own Ray."""

    is_local, actors = True, ()

    def lost_nodes(self) -> list[Any]:
        raise AssertionError("no node can leave, so nobody waits for that")


@pytest.fixture
def session() -> Session:
    listener: Any = SimpleNamespace(check=lambda: None)
    return Session(RunConfig(), FakeCluster(), SimpleNamespace(), listener)  # type: ignore[arg-type]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> PendingCalls:
    """Calls of three ranks, of which the second dies."""
    ray = FakeRay()
    monkeypatch.setattr(actor_group, "ray", ray)
    monkeypatch.setattr(actor_group, "time", ray)
    actors = rollouts(ray, (1.0, value(10)), (2.0, RayActorError()), (3.0, value(12)))
    return start_calls(actors, Phase.ROLLOUT, "generate", lambda _: ())


def test_after_a_death_a_run_with_its_own_ray_waits_for_no_node_to_leave(session: Session, calls: PendingCalls) -> None:
    with pytest.raises(RankError) as raised:
        session.finish(calls)
    assert raised.value.rank_id == R1


def test_calls_that_are_given_up_have_no_value_and_the_others_are_waited_for(
    session: Session, calls: PendingCalls
) -> None:
    failures: list[RunError] = []

    def rescue(error: RunError, pending: PendingCalls) -> PendingCalls:
        failures.append(error)
        return pending.without([R1])

    session.rescue = rescue
    left, values = session.finish_left(calls)
    assert values == [10, 12]
    assert [actor.rank for actor in left.refs.values()] == [0, 2]
    assert len(failures) == session.totals[Phase.ROLLOUT].count == 1


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> dict[int, PendingCalls]:
    """The starts of two engines of one rank, by engine. The second one answers first."""
    ray = FakeRay()
    for module in (actor_group, session_module):
        monkeypatch.setattr(module, "time", ray)
    monkeypatch.setattr(actor_group, "ray", ray)
    actors = rollouts(ray, (500.0, value("up")), (20.0, value("up")))
    return {engine: start_calls([actor], Phase.START, "start", lambda _: ()) for engine, actor in enumerate(actors)}


def test_the_start_that_answers_first_is_taken_first(session: Session, starts: dict[int, PendingCalls]) -> None:
    assert session.first_to_finish(starts) == 1
    assert session.first_to_finish({0: starts[0]}) == 0
    assert session.is_overdue(starts[0])


def test_the_start_of_a_dead_engine_is_taken_at_once(
    session: Session, starts: dict[int, PendingCalls], monkeypatch: pytest.MonkeyPatch
) -> None:
    (second,) = starts[1].refs.values()
    monkeypatch.setattr(session._vitals, "first_dead", lambda actors: second)
    assert session.first_to_finish(starts) == 1
    assert not session.is_overdue(starts[1])
