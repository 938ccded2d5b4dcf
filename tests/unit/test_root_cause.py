"""Which of several failures the others follow from. No message is looked at: all say the same here."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from rl_safe_workers.errors import (
    Awaited,
    Cause,
    CheckpointError,
    CommunicatorError,
    Died,
    PhaseTimeoutError,
    Raised,
    RankError,
    Repeats,
    RunError,
    Stopped,
    StoreLostError,
    Victim,
    WeightSyncError,
)
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.ranks import RankId, Role, trainer_id, trainer_ids
from rl_safe_workers.root_cause import STORE_BARRIER, Spot, cause_of, odd_ones, root_cause

pytestmark = pytest.mark.usefixtures("without_messages")

T0, T1, T2, T3 = trainer_ids(range(4))
R0, R1 = RankId(Role.ROLLOUT, 0), RankId(Role.ROLLOUT, 1)


def of(rank_id: RankId, cause: Cause, at_s: float = 5.0) -> RankError:
    return RankError(rank_id=rank_id, phase="train", cause=cause, text="", trace="", raised_at=at_s)


def reports(*errors: RankError) -> dict[RankId, RunError]:
    return {error.rank_id: error for error in errors}


def late(*missing: RankId) -> PhaseTimeoutError:
    return PhaseTimeoutError(
        phase="train",
        awaited=Awaited("x", frozenset(trainer_ids(range(4)))),
        missing=missing,
        waited_s=9.0,
        setting="s",
    )


TABLE: dict[str, tuple[Mapping[RankId, RunError], set[RankId], RankId, set[RankId], bool]] = {
    # reports, who is pending, whose report is the root's, the culprits, and whether that report is about them
    "one that raised": (reports(of(T1, Raised())), set(), T1, {T1}, True),
    "one that died": (reports(of(R1, Died())), {T0}, R1, {R1}, True),
    "a death before an earlier exception": (reports(of(T0, Raised(), 1), of(T1, Died(), 9)), set(), T1, {T1}, True),
    "a death before who names someone": ({T0: late(T2), **reports(of(T1, Died()))}, set(), T1, {T1}, True),
    "of two deaths the first that was noticed": (
        reports(of(T0, Died(), 8), of(T1, Died(), 7)),
        set(),
        T1,
        {T1},
        True,
    ),
    "of two exceptions the earlier": (reports(of(T0, Raised(), 7), of(T1, Raised(), 6)), set(), T1, {T1}, True),
    "an exception before those that repeat it, however early": (
        reports(of(T0, Repeats(T1), 2), of(T1, Raised(), 3)),
        set(),
        T1,
        {T1},
        True,
    ),
    "an exception before a repetition of another one": (
        reports(of(T0, Repeats(T3), 2), of(T1, Raised(), 3)),
        set(),
        T1,
        {T1},
        True,
    ),
    "an exception before a rank that gave up waiting": (
        {**reports(of(T0, Victim(), 5), of(T2, Raised(), 9)), T1: late(T2)},
        set(),
        T2,
        {T2},
        True,
    ),
    "a death before a rank that is stopped": (reports(of(T0, Stopped(), 1), of(T1, Died(), 9)), set(), T1, {T1}, True),
    "an exception before a rank that is stopped": (
        reports(of(T0, Stopped(), 1), of(T1, Raised(), 9)),
        set(),
        T1,
        {T1},
        True,
    ),
    "a rank that is stopped before who waits for it and others": (
        {**reports(of(T1, Stopped(), 9)), T0: late(T1, T2)},
        {T2},
        T1,
        {T1},
        True,
    ),
    "a repetition, where the rank itself has not answered": (
        reports(of(T0, Repeats(T3), 2), of(T1, Victim(), 1)),
        {T3},
        T0,
        {T3},
        True,
    ),
    "no repetition of a victim": (reports(of(T0, Repeats(T1), 2), of(T1, Victim(), 3)), {R0}, T1, {R0}, False),
    "no repetition of a rank that names the missing": (
        {**reports(of(T0, Repeats(T1), 2)), T1: late(T2)},
        {T2},
        T1,
        {T2},
        True,
    ),
    "a rank that passes on what all say of it": ({T0: late(T1), T1: late(T1)}, set(), T0, {T1}, True),
    "a report that names the missing before a victim": (
        {**reports(of(T0, Victim(), 1)), T1: late(T2)},
        {T2, R0},
        T1,
        {T2},
        True,
    ),
    "of two that name missing ranks the one that names none that waits itself": (
        {T1: late(R0, T2), R0: late(T2)},
        {T2},
        R0,
        {T2},
        True,
    ),
    "no report that names a victim": ({T0: late(T1), **reports(of(T1, Victim(), 3))}, {R0}, T1, {R0}, False),
    "of missing ranks those that are no victims": (
        {T0: late(T1, T2), **reports(of(T1, Victim(), 3))},
        {T2, R0},
        T0,
        {T2},
        True,
    ),
    "a victim before a timeout that names nobody": (
        {T0: late(), **reports(of(T1, Victim(), 3))},
        {T2},
        T1,
        {T2},
        False,
    ),
    "a timeout that names nobody, for those that are pending": ({T0: late()}, {T1}, T0, {T1}, False),
    "victims alone, for all that are pending": (reports(of(T0, Victim())), {T1, R0}, T0, {T1, R0}, False),
    "of victims alone the first, when nobody is pending": (
        reports(of(T0, Victim(), 9), of(T1, Victim(), 8)),
        set(),
        T1,
        set(),
        False,
    ),
    "equals in the order of ranks, trainers first": (
        reports(of(R0, Raised()), of(T1, Raised()), of(T0, Raised())),
        set(),
        T0,
        {T0},
        True,
    ),
    "an error of another class counts as raised": (
        {T0: CommunicatorError("no"), **reports(of(T1, Victim(), 1))},
        set(),
        T0,
        {T0},
        True,
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_root_is_found(case: str) -> None:
    found, pending, whose, culprits, is_told = TABLE[case]
    for mapping in (found, dict(reversed(list(found.items())))):
        root = root_cause(mapping, pending=pending)
        assert (root.error, root.culprits, root.is_told) == (found[whose], culprits, is_told)


def test_reports_that_have_crossed_processes_give_the_same_root() -> None:
    for found, pending, _, culprits, is_told in TABLE.values():
        root = root_cause(pickle.loads(pickle.dumps(found)), pending=pickle.loads(pickle.dumps(pending)))
        assert (root.culprits, root.is_told) == (culprits, is_told)


UPDATE = Spot("train", "all_reduce", "tiny.py:46 (average_gradients)")
METRICS = Spot("train", "all_reduce", "train.py:22 (<module>)")


@pytest.mark.parametrize(
    ("spots", "odd"),
    [
        ([UPDATE, UPDATE, UPDATE, METRICS], {T3}),
        ([METRICS, UPDATE, UPDATE, METRICS, UPDATE], {T0, T3}),
        ([UPDATE, METRICS], set()),
        ([UPDATE, UPDATE, UPDATE], set()),
        ([UPDATE, UPDATE, METRICS, replace(METRICS, phase="save")], set()),
        ([UPDATE, UPDATE, replace(METRICS, op=None)], set()),
        ([replace(UPDATE, op="recv"), replace(UPDATE, op="recv"), METRICS], set()),
        ([replace(UPDATE, op="broadcast"), replace(UPDATE, op="broadcast"), replace(METRICS, op="broadcast")], set()),
        ([UPDATE, UPDATE, replace(METRICS, op="broadcast")], {T2}),
        ([UPDATE, UPDATE, Spot("teardown", STORE_BARRIER, None)], {T2}),
    ],
    ids=[
        "one of four",
        "two of five",
        "halves",
        "all at one line",
        "three places",
        "a collective that is not known",
        "a pipeline",
        "the root of a collective",
        "another collective",
        "the teardown",
    ],
)
def test_the_rank_that_waits_in_another_collective_than_most_is_the_odd_one(
    spots: Sequence[Spot], odd: set[RankId]
) -> None:
    assert odd_ones(dict(zip(trainer_ids(range(len(spots))), spots, strict=True))) == odd


GLOO = RuntimeError("[/x/unbound_buffer.cc:78] Timed out waiting 1500ms for recv operation to complete")
FULL = OSError(28, "No space left on device")


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("no"), Raised()),
        (GLOO, Victim()),
        (StoreLostError("x"), Victim()),
        (WeightSyncError("x", foreign=ForeignCause.PEER_LOST), Victim()),
        (WeightSyncError("x", foreign=ForeignCause.TIMEOUT, culprit=T3), Victim()),
        (WeightSyncError("x", foreign=ForeignCause.OUT_OF_MEMORY), Raised()),
        (WeightSyncError("x", foreign=ForeignCause.OUT_OF_MEMORY, culprit=T3), Repeats(T3)),
        (CommunicatorError("x", culprit=T3), Repeats(T3)),
        (CommunicatorError("x", culprit=R0), Repeats(R0)),
        (CommunicatorError("x", culprit=T1), Raised()),
        (caused(CheckpointError("x"), GLOO), Victim()),
        (caused(CheckpointError("x"), caused(RunError("x"), GLOO)), Victim()),
        (caused(CheckpointError("x"), FULL), Raised()),
        (FULL, Raised()),
        (OSError(110, "Connection timed out", "/nfs/checkpoints"), Raised()),
        (TimeoutError("timed out"), Raised()),
        (AssertionError(str(GLOO)), Raised()),
    ],
)
def test_how_a_rank_came_to_fail_is_told_by_types_and_fields(error: Exception, cause: Cause) -> None:
    assert cause_of(error, T1) == cause


def test_an_error_that_is_its_own_cause_ends_the_search() -> None:
    first, second = RunError("x"), RunError("y")
    first.__cause__, second.__cause__ = second, first
    assert cause_of(first, T1) == Raised()


def test_trainers_sort_before_rollout_ranks_and_each_by_number() -> None:
    assert sorted([R1, T2, R0, trainer_id(10)]) == [T2, trainer_id(10), R0, R1]
    assert max(T2, R0) == R0
    assert T2 <= R0
    assert str(R1) == "rollout rank 1"
