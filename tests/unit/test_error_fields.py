"""Texts of errors, made from their fields, and the fields' way between ranks."""

from __future__ import annotations

import json
import pickle

import pytest

from rl_safe_workers import errors
from rl_safe_workers.errors import (
    Awaited,
    CheckpointMismatchError,
    NodeLostError,
    PhaseTimeoutError,
    Raised,
    RankError,
    RlSafeError,
    RunError,
    UnsafeCheckpointError,
    WeightSyncError,
    error_named,
    first_line,
    foreign_cause,
    in_one_line,
)
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.ranks import RankId, Role, joint_ids, trainer_id, trainer_ids
from rl_safe_workers.root_cause import report_from_text

R0, R1 = RankId(Role.ROLLOUT, 0), RankId(Role.ROLLOUT, 1)
WORLD = Awaited("training world", frozenset(trainer_ids(range(8))))
JOINT = Awaited("joint group 0", frozenset(joint_ids(trainers=2, size=4)))


def late(awaited: Awaited, *missing: RankId, detail: str = "") -> PhaseTimeoutError:
    return PhaseTimeoutError(
        phase="save", awaited=awaited, missing=missing, waited_s=3.04, setting="rl_safe.timeouts.save", detail=detail
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (late(WORLD, *trainer_ids([2, 1, 5])), "rank 1-2, 5 of training world did not arrive within 3.0 s"),
        (late(WORLD), "training world did not finish within 3.0 s"),
        (late(Awaited("the placement group")), "the placement group did not finish within 3.0 s"),
        (late(JOINT, R1), "rollout rank 1 of joint group 0 did not arrive within 3.0 s"),
        (
            late(JOINT, R0, trainer_id(1)),
            "training rank 1, rollout rank 0 of joint group 0 did not arrive within 3.0 s",
        ),
        (late(WORLD, trainer_id(1), detail="x; y"), "rank 1 of training world did not arrive within 3.0 s (x; y)"),
    ],
)
def test_a_timeout_names_what_was_waited_for_and_the_setting(error: PhaseTimeoutError, said: str) -> None:
    assert str(error) == f"phase save: {said}; to wait longer raise rl_safe.timeouts.save"


@pytest.mark.parametrize("error", [late(WORLD), late(JOINT, R1, trainer_id(0), detail="x"), late(Awaited("a node"))])
def test_a_timeout_is_the_same_for_the_rank_that_is_told(error: PhaseTimeoutError) -> None:
    for copy in (
        PhaseTimeoutError.from_json(json.loads(json.dumps(error.as_json()))),
        pickle.loads(pickle.dumps(error)),
    ):
        assert (type(copy), vars(copy), str(copy)) == (PhaseTimeoutError, vars(error), str(error))


def test_timeouts_of_thousands_of_ranks_share_the_names_of_the_others() -> None:
    ranks = trainer_ids(range(4096))
    error = late(Awaited("training world", frozenset(ranks)), *ranks[1:])
    error.add_note("kept")
    fields, pickled = json.dumps(error.as_json()), pickle.dumps(error)
    assert max(len(fields), len(pickled)) < 1024
    first, second, third = pickle.loads(pickled), pickle.loads(pickled), PhaseTimeoutError.from_json(json.loads(fields))
    assert first.awaited.members is second.awaited.members is third.awaited.members
    assert first.missing is second.missing is third.missing
    assert first.__notes__ == ["kept"]


@pytest.mark.parametrize("text", ["0-131072", "0-131071, 7", "1-", "all", "-1", [0, 1], 7])
def test_ranks_that_are_no_ranges_are_refused(text: object) -> None:
    told = json.dumps({"late": {**late(WORLD).as_json(), "missing": {"trainer": text}}})
    with pytest.raises(ValueError, match="no report of a rank|ranks|invalid literal"):
        report_from_text(told)


def test_a_timeout_can_name_fewer_ranks() -> None:
    error = late(WORLD, *trainer_ids([1, 2, 3]), detail="x")
    fewer = error.with_missing([trainer_id(3)])
    assert vars(fewer) == {**vars(error), "missing": frozenset({trainer_id(3)})}
    assert "rank 3 of training world" in str(fewer)
    assert error.missing == set(trainer_ids([1, 2, 3]))


def test_a_rank_and_its_phase_are_named() -> None:
    error = RankError(rank_id=R1, phase="sync", cause=Raised(), text="ValueError: x", trace="", raised_at=1.0)
    assert str(error) == "rollout rank 1 failed in phase sync: ValueError: x"


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (["10.0.0.4"], "node 10.0.0.4 is lost, and with it training rank 2-3, rollout rank 1 (it died)"),
        (["a", "b"], "nodes a, b are lost, and with them training rank 2-3, rollout rank 1 (it died)"),
    ],
)
def test_a_lost_node_and_its_ranks_are_named(nodes: list[str], said: str) -> None:
    error = NodeLostError(nodes=nodes, phase="train", ranks=[R1, *trainer_ids([3, 2])], detail="it died")
    assert str(error) == f"phase train: {said}"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no\nTraceback"), "ValueError: no"),
        (ValueError(), "ValueError: "),
        (RunError("what; what to do"), "what; what to do"),
    ],
)
def test_an_error_fits_on_a_line(error: Exception, line: str) -> None:
    assert in_one_line(error) == line
    assert first_line(ValueError()) == ""


def test_a_kind_of_ones_own_wins_over_that_of_a_cause() -> None:
    error = WeightSyncError("x", foreign=ForeignCause.TIMEOUT)
    error.__cause__ = MemoryError()
    assert foreign_cause(error) is ForeignCause.TIMEOUT


CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, RlSafeError)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_of_error_can_be_told_by_its_name(cls: type[RlSafeError]) -> None:
    error = error_named(cls.__name__, "training rank 1: no")
    assert str(error) == "training rank 1: no"
    assert type(error) is (RunError if "__init__" in vars(cls) else cls)


@pytest.mark.parametrize("name", ["ValueError", "Sequence", "RankId", "signal", "_rebuild", "", "x.y"])
def test_a_name_that_is_no_error_of_ours_makes_a_run_error(name: str) -> None:
    assert type(error_named(name, "x")) is RunError
    assert type(error_named("UnsafeCheckpointError", "x")) is UnsafeCheckpointError
    assert CheckpointMismatchError.exit_code == 2
