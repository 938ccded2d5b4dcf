"""Every operation of the control plane, with a missing, a late and a raising rank; and the keys that they leave."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.failure import Failure
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import (
    Awaited,
    CheckpointError,
    CheckpointMismatchError,
    CommunicatorError,
    PhaseTimeoutError,
    Raised,
    Repeats,
    RunError,
    StoreLostError,
)
from rl_safe_workers.ranks import trainer_id, trainer_ids
from rl_safe_workers.root_cause import root_cause
from tests.small_world import SmallWorld

SHORT_S, LONG_S = 1.0, 20.0
Call = Callable[[ControlPlane], Any]


@pytest.fixture
def world() -> SmallWorld:
    return SmallWorld()


def _barrier(plane: ControlPlane, seconds: float = LONG_S) -> None:
    plane.barrier("save", Deadline.after(seconds))


def _decide(plane: ControlPlane, seconds: float = LONG_S, **arguments: Any) -> Any:
    return plane.gathering("vote", phase="save").settle(Deadline.after(seconds), **arguments)


def _verdicts(plane: ControlPlane, seconds: float = LONG_S, failure: str | None = None) -> dict[int, str]:
    return plane.exchange_outcomes(failure, phase="teardown", deadline=Deadline.after(seconds))


def test_a_barrier_holds_everyone_until_the_last_has_come(world) -> None:
    came: list[float] = []

    def meet(plane: ControlPlane) -> float:
        time.sleep(0.3 if plane.rank == 1 else 0)
        came.append(time.monotonic())
        _barrier(plane)
        return time.monotonic()

    assert min(world.each(meet)) >= max(came)


@pytest.mark.parametrize("wait", [_barrier, _decide])
def test_a_missing_rank_is_named_with_the_phase_the_wait_and_the_setting(wait: Call, world) -> None:
    for error in world.each(lambda plane: wait(plane, SHORT_S), ranks=[0, 2]):
        assert isinstance(error, PhaseTimeoutError)
        assert (error.phase, error.awaited, error.missing) == (
            "save",
            Awaited("training world", frozenset(trainer_ids(range(3)))),
            {trainer_id(1)},
        )
        assert SHORT_S <= error.waited_s < 5
        assert str(error) == (
            f"phase save: rank 1 of training world did not arrive within {error.waited_s:.1f} s; "
            "to wait longer raise rl_safe.timeouts.save"
        )


def test_a_rank_that_comes_after_the_deadline_learns_who_was_missing(world) -> None:
    def come(plane: ControlPlane) -> Any:
        time.sleep(3 * SHORT_S if plane.rank == 1 else 0)
        return _decide(plane, SHORT_S if plane.rank != 1 else LONG_S)

    for error in world.each(come):
        assert isinstance(error, PhaseTimeoutError)
        assert error.missing == {trainer_id(1)}


def test_without_rank_0_nothing_is_decided_and_it_is_named(world) -> None:
    for error in world.each(lambda plane: _decide(plane, SHORT_S), ranks=[1, 2]):
        assert isinstance(error, PhaseTimeoutError)
        assert error.missing == {trainer_id(0)}


def test_rank_0_decides_upon_all_reports_and_everyone_learns_of_it(world) -> None:
    assert world.each(lambda plane: _decide(plane, report=plane.rank, decide=list)) == [[0, 1, 2]] * 3


def test_a_long_report_arrives_whole(world) -> None:
    long = "report " * 100_000
    assert world.each(lambda plane: _decide(plane, report=long, decide=lambda r: r[2] == long)) == [True] * 3


def test_a_failure_of_one_rank_is_raised_by_all_with_its_kind_and_its_rank(world) -> None:
    failure = CheckpointMismatchError("another model")
    zero, one, two = world.each(lambda plane: _decide(plane, failure=failure if plane.rank == 1 else None))
    assert one is failure
    for error in (zero, two):
        assert type(error) is CheckpointMismatchError
        assert (str(error), error.culprit) == ("training rank 1: another model", trainer_id(1))


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (("the disk is full", "the disk is full"), "training rank 0-1: the disk is full"),
        (("file 0 is gone", "file 1 is gone"), "training rank 0: file 0 is gone; and 1 more"),
    ],
)
def test_the_error_of_many_ranks_stays_short(
    texts: tuple[str, str], told: str, world, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_safe_workers.control.plane._SHOWN_FAILURES", 1)
    failures = [*map(CheckpointError, texts), None]
    error = world.each(lambda plane: _decide(plane, failure=failures[plane.rank]))[2]
    assert str(error) == told


@pytest.mark.parametrize(("foreign", "kind"), [({}, RunError), ({"foreign": CheckpointError}, CheckpointError)])
def test_an_error_that_is_not_ours_becomes_what_the_caller_says(foreign: dict[str, Any], kind: type, world) -> None:
    failure = OSError()  # without a message
    outcomes = world.each(lambda plane: _decide(plane, failure=failure if plane.rank == 2 else None, **foreign))
    assert [type(error) for error in outcomes] == [kind] * 3


def test_what_the_decision_raises_is_raised_by_all_and_blamed_on_rank_0(world) -> None:
    for error in world.each(lambda plane: _decide(plane, decide=lambda reports: {}["x"])):
        assert (type(error), str(error), error.culprit) == (RunError, "KeyError: 'x'", trainer_id(0))


def test_a_culprit_that_was_heard_of_stays_the_culprit(world) -> None:
    failure = CheckpointError("rank 2 said so", culprit=trainer_id(2))
    error, *_ = world.each(lambda plane: _decide(plane, failure=failure if plane.rank == 1 else None))
    assert error.culprit == trainer_id(2)


def test_a_gathering_can_be_asked_without_waiting(world) -> None:
    first, *others = [plane.begin("save", phase="save").gathering("written") for plane in world.planes]
    for gathering in others:
        gathering.report("written")
        assert not first.all_reported()
        assert gathering.decision() is None
    first.report("written, too")
    assert first.all_reported()
    first.conclude(sorted(first.values(Deadline.after(LONG_S))))
    assert [g.decision().value for g in (first, *others)] == [["written", "written", "written, too"]] * 3


def test_a_rank_that_gives_up_takes_its_report_back(world) -> None:
    gatherings = [plane.begin("save", phase="save").gathering("written") for plane in world.planes]
    for gathering in gatherings:
        gathering.report("written")
    gatherings[2].report(failure=Failure("out of memory", kind="CheckpointError", culprit=trainer_id(2)))
    with pytest.raises(CheckpointError, match="training rank 2: out of memory") as caught:
        gatherings[0].values(Deadline.after(LONG_S))
    assert caught.value.culprit == trainer_id(2)


def test_verdicts_name_who_is_not_well_and_who_gave_none(world) -> None:
    assert world.each(_verdicts) == [{}] * 3
    assert world.each(lambda plane: _verdicts(plane, failure="no" if plane.rank == 2 else None)) == [{2: "no"}] * 3
    assert world.each(lambda plane: _verdicts(plane, SHORT_S), ranks=[0, 2]) == [{1: "did not report in time"}] * 2


def test_only_the_owner_waits_for_those_who_sign_off(world) -> None:
    left: dict[int, float] = {}

    def leave(plane: ControlPlane) -> None:
        time.sleep(0.5 if plane.rank == 2 else 0)
        plane.sign_off("teardown", Deadline.after(LONG_S))
        left[plane.rank] = time.monotonic()

    assert world.each(leave) == [None] * 3
    assert left[1] < left[0] - 0.3
    (error,) = world.each(lambda plane: plane.sign_off("teardown", Deadline.after(SHORT_S)), ranks=[0])
    assert isinstance(error, PhaseTimeoutError)
    assert error.missing == {trainer_id(1), trainer_id(2)}


def test_a_letter_is_taken_once_and_leaves_no_key(world) -> None:
    one, two = (plane.mailbox("pair") for plane in world.planes[:2])
    before = world.store.num_keys()
    one.leave("a", b"text")
    assert two.take("a", Deadline.after(LONG_S)) == b"text"
    assert two.take("a", Deadline.after(0)) is None
    assert world.store.num_keys() == before


def test_calls_of_other_names_phases_scopes_and_worlds_do_not_answer_for_each_other(world) -> None:
    def wait(plane: ControlPlane) -> Any:
        other = plane.of_world("other world", rank=plane.rank, members=plane.members) if plane.rank == 2 else plane
        return _barrier(other, SHORT_S)

    def wait_in_a_scope(plane: ControlPlane) -> Any:
        return _decide(plane.scope("actor") if plane.rank == 2 else plane.scope("critic"), SHORT_S)

    def wait_in_a_phase(plane: ControlPlane) -> Any:
        plane.barrier("load" if plane.rank == 2 else "save", Deadline.after(SHORT_S))

    for call in (wait, wait_in_a_scope, wait_in_a_phase):
        zero, one, two = world.each(call)
        assert zero.missing == one.missing == {trainer_id(2)}
        assert two.missing in (set(trainer_ids([0, 1])), {trainer_id(0)})


def test_repeated_calls_are_told_apart(world) -> None:
    def call(plane: ControlPlane) -> None:
        for _ in range(2 if plane.rank == 1 else 3):
            _barrier(plane, 1.0)

    zero, one, two = world.each(call)
    assert (zero.missing, one, two.missing) == ({trainer_id(1)}, None, {trainer_id(1)})


def test_a_worker_that_is_made_anew_goes_on_with_the_right_number(world) -> None:
    for _ in range(3):
        assert world.each(_decide) == [None] * 3
    world.planes[1] = world.plane(1)
    assert world.each(lambda plane: _decide(plane, report=plane.rank, decide=sum)) == [3] * 3


def test_a_thousand_operations_leave_as_many_keys_as_a_few(world) -> None:
    def work(plane: ControlPlane) -> None:
        _barrier(plane)
        _decide(plane, report=[plane.rank] * 1000, decide=len)
        operation = plane.begin("save", phase="save")
        operation.gathering("start").settle(Deadline.after(LONG_S))
        operation.gathering("written").settle(Deadline.after(LONG_S))
        _verdicts(plane)

    def counted(times: int) -> int:
        for _ in range(times):
            assert world.each(work) == [None] * 3
        return int(world.store.num_keys())

    few = counted(2)
    assert counted(250) == few


def test_a_store_that_is_gone_is_told_as_such_by_every_operation() -> None:
    world = SmallWorld(size=2)
    plane = world.planes[1]
    _ = plane.begin("warm", phase="save")
    world.planes, store = [], world.store
    world.store = None
    del store
    for call in (_barrier, _decide, lambda plane: plane.sign_off("teardown", Deadline.after(LONG_S))):
        with pytest.raises(StoreLostError, match=r"rank 1 of training world has lost the run's store: its owner, tr"):
            call(plane)
    assert _verdicts(plane) == {0: "has ended, and the run's store with it"}


def test_whoever_looks_into_the_store_learns_what_ranks_have_failed_with(world) -> None:
    world.planes[1].report_failure(ValueError("no such expert"), phase="train")
    world.planes[2].report_failure(CommunicatorError("x", culprit=trainer_id(1)), phase="train")
    late = world.each(lambda plane: _barrier(plane, SHORT_S), ranks=[0])[0]
    world.planes[0].report_failure(late, phase="save")
    told = world.plane(-1).reported_failures()
    assert list(told) == list(trainer_ids(range(3)))
    assert (type(told[trainer_id(0)]), str(told[trainer_id(0)])) == (PhaseTimeoutError, str(late))
    assert (told[trainer_id(1)].cause, told[trainer_id(1)].text) == (Raised(), "ValueError: no such expert")
    assert told[trainer_id(2)].cause == Repeats(trainer_id(1))
    assert root_cause(told).culprits == {trainer_id(1)}


def test_nobody_has_reported_a_failure_before_one_does(world) -> None:
    assert world.plane(-1).reported_failures() == {}


def test_a_process_outside_the_world_takes_no_part(world) -> None:
    outside = world.plane(-1)
    with pytest.raises(ValueError, match="outside of training world"):
        outside.report_failure(RunError("no"), phase="train")
    with pytest.raises(ValueError, match="outside of training world"):
        _barrier(outside)
