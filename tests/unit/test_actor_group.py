"""Waiting for many actors: one deadline, and of several failures the one that the others follow from."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ObjectLostError, RayActorError

from rl_safe_workers.driver.cluster import actor_group
from rl_safe_workers.driver.cluster.actor_group import (
    GRACE_S,
    SLACK_S,
    ActorRef,
    PendingCalls,
    gather,
    is_dead,
    start_calls,
)
from rl_safe_workers.driver.cluster.actors import Reply
from rl_safe_workers.driver.cluster.interrupts import SLICE_S
from rl_safe_workers.errors import (
    Awaited,
    ClusterError,
    Died,
    Interrupted,
    PhaseTimeoutError,
    RankError,
    Repeats,
    RunError,
    Victim,
)
from rl_safe_workers.lifecycle import Phase, PhaseEvent
from rl_safe_workers.ranks import RankId, Role, trainer_id, trainer_ids
from tests.unit.fake_ray import TIMEOUT_S, FakeRay, event, failure, rollouts, timed_out, trainers, value

pytestmark = pytest.mark.usefixtures("without_messages")

NEVER_S = 1e9


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(actor_group, "ray", fake)
    monkeypatch.setattr(actor_group, "time", fake)
    return fake


def start(actors: list[ActorRef]) -> PendingCalls:
    return start_calls(actors, Phase.TRAIN, "train", lambda rank: (rank, "x"))


def wait_for(calls: PendingCalls, *, events: list[PhaseEvent] | None = None, hears_all: bool = False) -> list[Any]:
    taken = [] if events is None else events
    return gather(calls, timeout_s=TIMEOUT_S, on_events=taken.extend, check=lambda: None, hears_all=hears_all)


def error_of(actors: list[ActorRef]) -> RunError:
    with pytest.raises(RunError) as raised:
        wait_for(start(actors))
    return raised.value


def rank_error(actors: list[ActorRef]) -> RankError:
    error = error_of(actors)
    assert isinstance(error, RankError)
    return error


def late_error(actors: list[ActorRef]) -> PhaseTimeoutError:
    error = error_of(actors)
    assert isinstance(error, PhaseTimeoutError)
    return error


def test_a_process_that_has_left_ray_starts_no_other(ray: FakeRay) -> None:
    ray.is_there = False
    with pytest.raises(RunError):
        start(trainers(ray, (1.0, value(10))))
    assert ray.calls == []


def test_a_directory_that_does_not_answer_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(actor_group, "actor_state", lambda actor_id: answers.wait(60))
    monkeypatch.setattr(actor_group, "ANSWERS", timedelta(seconds=0.1))
    with pytest.raises(ClusterError):
        is_dead(ActorRef(role=Role.TRAINER, rank=0, handle=SimpleNamespace(_actor_id=b"id")))
    answers.set()


def test_values_come_in_the_order_of_the_calls(ray: FakeRay) -> None:
    actors = trainers(ray, (3.0, value(10)), (1.0, value(11)), (2.0, value(12)))
    assert wait_for(start(actors)) == [10, 11, 12]


def test_every_rank_gets_the_phase_the_method_and_its_own_arguments(ray: FakeRay) -> None:
    start(trainers(ray, (0.0, value(0)), (0.0, value(1))))
    assert ray.calls == [("train", "train", (0, "x")), ("train", "train", (1, "x"))]


def test_no_actors_no_wait(ray: FakeRay) -> None:
    assert wait_for(start([])) == []


def test_two_sets_of_calls_are_waited_for_as_one(ray: FakeRay) -> None:
    first = start(trainers(ray, (2.0, value(1))))
    ray.now_s += 1
    both = first.joined_with(start(rollouts(ray, (0.5, value(2)))))
    assert both.started_s == first.started_s
    assert wait_for(both) == [1, 2]


def test_events_arrive_of_those_that_succeed_and_of_those_that_fail(ray: FakeRay) -> None:
    good = Reply(value=1, events=[event(0)])
    late = Reply(value=2, events=[event(2)])
    calls = start(trainers(ray, (0.0, good), (1.0, failure(1, at_s=5.0)), (1.5, late)))
    events: list[PhaseEvent] = []
    with pytest.raises(RankError):
        wait_for(calls, events=events)
    assert events == [event(0), event(1, ok=False), event(2)]


def test_the_failure_of_one_rank_does_not_wait_for_the_deadline(ray: FakeRay) -> None:
    error = rank_error(trainers(ray, (1.0, failure(0, at_s=5.0)), (NEVER_S, value(1))))
    assert (error.rank_id, error.phase, error.text) == (trainer_id(0), "train", "ValueError: x")
    assert ray.now_s <= 1000 + 1.0 + SLICE_S + GRACE_S


def test_of_several_failures_the_earliest_is_the_culprit(ray: FakeRay) -> None:
    reported_first, raised_first = failure(0, at_s=7.0), failure(1, at_s=6.0)
    assert rank_error(trainers(ray, (1.0, reported_first), (2.5, raised_first))).rank_id == trainer_id(1)


def test_a_death_wins_over_what_it_caused_however_late_it_is_noticed(ray: FakeRay) -> None:
    died = (1.0 + GRACE_S - 0.1, RayActorError())
    error = rank_error(trainers(ray, (1.0, failure(0, at_s=5.0)), died, (NEVER_S, value(2))))
    assert (error.rank_id, error.cause, error.text) == (trainer_id(1), Died(), "the process died")


def test_once_a_death_is_known_nothing_more_is_waited_for(ray: FakeRay) -> None:
    error_of(trainers(ray, (1.0, RayActorError()), (NEVER_S, value(1))))
    assert ray.now_s <= 1000 + 1.0 + SLICE_S


def test_a_lost_result_is_the_failure_of_its_rank(ray: FakeRay) -> None:
    error = rank_error(trainers(ray, (1.0, value(0)), (1.0, ObjectLostError("abc", None, ""))))
    assert (error.rank_id, error.text.partition(":")[0]) == (trainer_id(1), "ObjectLostError")
    assert "\n" not in error.text


def test_who_raised_wins_over_who_waited_in_vain(ray: FakeRay) -> None:
    victim = failure(0, at_s=5.0, cause=Victim())
    error = rank_error(trainers(ray, (1.0, victim), (1.0, timed_out(2)), (2.0, failure(2, at_s=9.0))))
    assert error.rank_id == trainer_id(2)


def test_a_rank_that_names_who_is_missing_is_believed(ray: FakeRay) -> None:
    error = late_error(trainers(ray, (1.0, timed_out(2)), (1.0, timed_out(2)), (NEVER_S, value(2))))
    assert (error.awaited.name, error.missing) == ("training world", {trainer_id(2)})


def test_who_has_failed_wins_over_who_has_only_heard_of_it_earlier(ray: FakeRay) -> None:
    replies = [failure(0, at_s=2.0, cause=Repeats(trainer_id(1))), failure(1, at_s=3.0)]
    assert rank_error(trainers(ray, *((1.0, reply) for reply in replies))).rank_id == trainer_id(1)


def test_if_all_that_failed_waited_for_one_that_is_busy_it_is_named(ray: FakeRay) -> None:
    victim = failure(0, at_s=5.0, cause=Victim())
    error = late_error(trainers(ray, (1.0, victim), (NEVER_S, value(1))))
    assert (error.awaited.name, error.missing) == ("the trainers", {trainer_id(1)})
    assert error.detail == str(victim.error)


def test_if_all_waited_in_vain_the_first_of_them_is_told(ray: FakeRay) -> None:
    replies = [failure(rank, at_s=9.0 - rank, cause=Victim()) for rank in range(3)]
    assert rank_error(trainers(ray, *((1.0, reply) for reply in replies))).rank_id == trainer_id(2)


def test_at_the_deadline_the_silent_ranks_are_named_with_the_setting(ray: FakeRay) -> None:
    error = late_error(trainers(ray, (1.0, value(0)), (NEVER_S, value(1)), (NEVER_S, value(2)), (2.0, value(3))))
    assert error.missing == set(trainer_ids([1, 2]))
    assert error.awaited == Awaited("the trainers", frozenset(trainer_ids(range(4))))
    assert error.setting == "rl_safe.timeouts.train"
    assert TIMEOUT_S + SLACK_S <= error.waited_s <= TIMEOUT_S + SLACK_S + SLICE_S


def test_at_the_deadline_silent_ranks_of_both_roles_are_named(ray: FakeRay) -> None:
    rollout = RankId(Role.ROLLOUT, 0)
    error = late_error([*rollouts(ray, (NEVER_S, value(9))), *trainers(ray, (1.0, value(0)), (NEVER_S, value(1)))])
    assert error.missing == {trainer_id(1), rollout}
    assert error.awaited == Awaited("the run", frozenset({*trainer_ids(range(2)), rollout}))


@pytest.mark.parametrize(
    ("trainer_s", "waited_s"), [(1.0, TIMEOUT_S), (TIMEOUT_S + 2, TIMEOUT_S + 2), (NEVER_S, TIMEOUT_S + SLACK_S)]
)
def test_a_rank_that_looks_at_no_clock_is_waited_for_no_longer_than_those_that_do(
    ray: FakeRay, trainer_s: float, waited_s: float
) -> None:
    late = rollouts(ray, (TIMEOUT_S + SLACK_S + 1, value(9)))
    calls = start_calls([*trainers(ray, (trainer_s, value(0))), *late], Phase.TEARDOWN, "teardown", lambda rank: ())
    with pytest.raises(PhaseTimeoutError) as raised:
        wait_for(calls)
    assert waited_s <= raised.value.waited_s <= waited_s + 2 * SLICE_S


def test_the_time_runs_from_the_start_of_the_calls(ray: FakeRay) -> None:
    calls = start(trainers(ray, (NEVER_S, value(0))))
    ray.now_s += TIMEOUT_S
    with pytest.raises(PhaseTimeoutError):
        wait_for(calls)
    assert ray.now_s <= 1000 + TIMEOUT_S + SLACK_S + SLICE_S


def test_answers_that_lay_ready_while_the_driver_was_busy_are_in_time(ray: FakeRay) -> None:
    calls = start(trainers(ray, (1.0, value(0)), (2.0, value(1))))
    ray.now_s += 2 * TIMEOUT_S
    assert wait_for(calls) == [0, 1]


def test_an_interrupt_ends_the_wait_within_a_slice(ray: FakeRay) -> None:
    def check() -> None:
        if ray.now_s > 1010:
            raise Interrupted(signum=2)

    with pytest.raises(Interrupted):
        gather(
            start(trainers(ray, (NEVER_S, value(0)))),
            timeout_s=TIMEOUT_S,
            on_events=list[PhaseEvent]().extend,
            check=check,
        )
    assert ray.now_s <= 1010 + 2 * SLICE_S


def test_a_wait_goes_on_without_a_rank_that_has_died_and_hears_of_no_event_twice(ray: FakeRay) -> None:
    actors = rollouts(ray, (1.0, Reply(value=10, events=[event(0)])), (2.0, RayActorError()), (3.0, value(12)))
    calls, events = start(actors), list[PhaseEvent]()
    with pytest.raises(RankError):
        wait_for(calls, events=events)
    assert wait_for(calls.without([RankId(Role.ROLLOUT, 1)]), events=events) == [10, 12]
    assert events == [event(0)]


def test_what_a_rank_answers_late_is_nobodys_value(ray: FakeRay) -> None:
    calls = start(rollouts(ray, (1.0, value(10)), (TIMEOUT_S + SLACK_S + 5.0, value(11))))
    with pytest.raises(PhaseTimeoutError) as raised:
        wait_for(calls)
    ray.now_s += 10.0
    assert wait_for(calls.without(raised.value.missing)) == [10]


def test_who_is_to_be_called_again_is_heard_first(ray: FakeRay) -> None:
    calls = start(rollouts(ray, (1.0, RayActorError()))).joined_with(start(trainers(ray, (30.0, failure(0, at_s=5.0)))))
    with pytest.raises(RankError) as raised:
        wait_for(calls, hears_all=True)
    assert (raised.value.rank_id, raised.value.cause) == (RankId(Role.ROLLOUT, 0), Died())
    assert ray.now_s >= 1000 + 30.0
    assert calls.is_answered


def test_nobody_is_heard_any_more_once_a_trainer_has_died(ray: FakeRay) -> None:
    calls = start(trainers(ray, (1.0, RayActorError()))).joined_with(start(rollouts(ray, (30.0, value(1)))))
    with pytest.raises(RankError):
        wait_for(calls, hears_all=True)
    assert ray.now_s <= 1000 + 1.0 + SLICE_S
    assert not calls.is_answered


def test_who_does_not_answer_after_a_failure_is_waited_for_until_the_deadline(ray: FakeRay) -> None:
    victim = failure(0, at_s=5.0, cause=Victim())
    calls = start(trainers(ray, (40.0, victim))).joined_with(start(rollouts(ray, (NEVER_S, value(1)))))
    with pytest.raises(PhaseTimeoutError) as raised:
        wait_for(calls, hears_all=True)
    assert raised.value.missing == {RankId(Role.ROLLOUT, 0)}
    assert ray.now_s == pytest.approx(1000 + TIMEOUT_S + SLACK_S)
