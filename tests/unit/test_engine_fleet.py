"""Which engines count as lost, who gets prompts, and when the engines of the joint group are not those that are up."""

from __future__ import annotations

import pytest

from rl_safe_workers.errors import (
    Awaited,
    Cause,
    Died,
    Interrupted,
    NodeLostError,
    PhaseTimeoutError,
    Raised,
    RankError,
    RunError,
    Stopped,
    Victim,
)
from rl_safe_workers.ranks import RankId, Role, trainer_id
from rl_safe_workers.rollout.engine_fleet import EngineFleet, lost_ranks

pytestmark = pytest.mark.usefixtures("without_messages")
R0, R1 = RankId(Role.ROLLOUT, 0), RankId(Role.ROLLOUT, 1)


def failed(cause: Cause, rank_id: RankId = R1) -> RankError:
    return RankError(rank_id=rank_id, phase="rollout", cause=cause, text="x", trace="", raised_at=1.0)


def late(*missing: RankId) -> PhaseTimeoutError:
    return PhaseTimeoutError(
        phase="sync", awaited=Awaited("the run"), missing=missing, waited_s=1.0, setting="rl_safe.timeouts.sync"
    )


def fleet_of(engines: int, *, most_lost: int = 9) -> EngineFleet:
    fleet = EngineFleet(engines, most_lost=most_lost, losses=[])
    for engine in range(engines):
        fleet.started(engine)
    fleet.joined(fleet.up)
    return fleet


def replace(fleet: EngineFleet, engine: int) -> None:
    fleet.lose(engine, failed(Died()), now_s=0.0)
    fleet.started(engine)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (failed(Died()), {R1}),
        (failed(Stopped()), {R1}),
        (late(R1), {R1}),
        (late(R0, R1), {R0, R1}),
        (failed(Raised()), set()),
        (failed(Victim()), set()),
        (failed(Died(), trainer_id(1)), set()),
        (late(trainer_id(1)), set()),
        (late(trainer_id(1), R1), set()),
        (late(), set()),
        (Interrupted(signum=2), set()),
        (NodeLostError(nodes=["10.0.0.4"], phase="train", ranks=[R1], detail="x"), set()),
    ],
)
def test_an_engine_is_lost_if_it_died_or_alone_does_not_answer(error: RunError, lost: set[RankId]) -> None:
    assert lost_ranks(error) == lost


def test_the_first_engines_serve_at_once_and_those_in_their_place_after_a_proof() -> None:
    fleet = fleet_of(2)
    assert (fleet.serving, fleet.needs_proof) == ([0, 1], False)
    fleet.lose(1, failed(Died()), now_s=10.0)
    assert (fleet.serving, fleet.up, fleet.starting) == ([0], [0], [1])
    fleet.started(1)
    assert (fleet.serving, fleet.up, fleet.needs_proof) == ([0], [0, 1], True)
    fleet.proved(now_s=12.5)
    assert (fleet.serving, fleet.needs_proof, fleet.returned(), fleet.returned()) == ([0, 1], False, [2.5], [])


def test_the_joint_group_is_built_anew_for_a_loss_and_for_the_engine_that_comes() -> None:
    fleet = fleet_of(2)
    assert not fleet.needs_join
    fleet.lose(1, failed(Died()), now_s=0.0)
    assert fleet.needs_join
    fleet.joined(fleet.up)
    assert not fleet.needs_join
    fleet.started(1)
    assert fleet.needs_join


def test_another_engine_with_the_number_of_a_member_is_no_member() -> None:
    fleet = fleet_of(1)
    replace(fleet, 0)
    assert fleet.needs_join


def test_a_loss_too_many_raises_its_failure_and_changes_nothing() -> None:
    fleet = fleet_of(2, most_lost=1)
    fleet.lose(0, failed(Died(), R0), now_s=0.0)
    error = failed(Died())
    with pytest.raises(RankError) as raised:
        fleet.lose(1, error, now_s=0.0)
    assert raised.value is error
    assert (fleet.serving, len(fleet.losses)) == ([1], 1)


def test_losses_of_an_earlier_attempt_count() -> None:
    losses = fleet_of(1).losses
    earlier = EngineFleet(1, most_lost=1, losses=losses)
    earlier.lose(0, failed(Died(), R0), now_s=0.0)
    with pytest.raises(RankError):
        EngineFleet(1, most_lost=1, losses=losses).lose(0, failed(Died(), R0), now_s=0.0)


@pytest.mark.parametrize(("prompts", "engines"), [(8, 1), (8, 3), (2, 3), (0, 2), (7, 7)])
def test_each_prompt_goes_to_one_engine_and_each_engine_has_a_share(prompts: int, engines: int) -> None:
    shares = fleet_of(engines).deal(range(prompts))
    assert [index for _, span in shares for index in span] == list(range(prompts))
    assert [engine for engine, _ in shares] == list(range(engines))


def test_prompts_that_are_left_over_go_out_in_runs_to_those_that_serve() -> None:
    fleet = fleet_of(3)
    replace(fleet, 1)
    assert fleet.deal([2, 3, 6, 7]) == [(0, range(2, 4)), (2, range(6, 8))]
    assert fleet.deal([1, 2, 5]) == [(0, range(1, 2)), (2, range(2, 3)), (2, range(5, 6))]
