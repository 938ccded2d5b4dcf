"""Reports of a failure: fields that travel as JSON and make the error that the others raise."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rl_safe_workers.control.failure import Failure, as_ours
from rl_safe_workers.errors import (
    Awaited,
    CheckpointError,
    CommunicatorError,
    ConfigError,
    PhaseTimeoutError,
    RlSafeError,
    RunError,
    StoreLostError,
    WeightSyncError,
)
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.ranks import RankId, Role, trainer_id, trainer_ids

R0 = RankId(Role.ROLLOUT, 0)
LATE = PhaseTimeoutError(
    phase="save",
    awaited=Awaited("training world", frozenset(trainer_ids(range(4)))),
    missing=trainer_ids([1, 3]),
    waited_s=3.04,
    setting="rl_safe.timeouts.save",
    detail="x",
)


def told(failure: Failure) -> Failure:
    """The failure as another rank reads it."""
    return Failure.from_json(json.loads(json.dumps(failure.as_json())))


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError("no\nmore"), Failure("ValueError: no")),
        (MemoryError(), Failure("MemoryError: ", foreign=ForeignCause.OUT_OF_MEMORY)),
        (StoreLostError("gone"), Failure("gone", kind="StoreLostError", foreign=ForeignCause.STORE_LOST)),
        (
            WeightSyncError("x", foreign=ForeignCause.TIMEOUT),
            Failure("x", kind="WeightSyncError", foreign=ForeignCause.TIMEOUT),
        ),
        (CheckpointError("y", culprit=R0), Failure("y", kind="CheckpointError", culprit=R0)),
        (ConfigError("z"), Failure("z", kind="ConfigError")),
    ],
)
def test_a_failure_is_told_with_its_fields(error: Exception, failure: Failure) -> None:
    assert told(Failure.of(error)) == failure
    others = failure.error()
    assert str(others) == failure.text
    assert type(others) is (type(error) if isinstance(error, RlSafeError) else RunError)
    assert Failure.of(others) == failure


def test_a_timeout_is_told_whole() -> None:
    late = told(Failure.of(LATE)).error()
    assert isinstance(late, PhaseTimeoutError)
    assert (vars(late), str(late)) == (vars(LATE), str(LATE))


def test_a_failure_that_is_not_ours_becomes_what_the_caller_names() -> None:
    error = OSError(28, "No space left on device")
    failure = told(Failure.of(error, otherwise=CheckpointError))
    assert failure == Failure(
        "OSError: [Errno 28] No space left on device", kind="CheckpointError", foreign=ForeignCause.NO_SPACE
    )
    own = as_ours(error, CheckpointError)
    assert (type(own), str(own)) == (CheckpointError, failure.text)


def test_a_culprit_is_named_unless_one_is_known_or_ranks_are_missing() -> None:
    assert told(Failure("x").by(trainer_id(2))).culprit == trainer_id(2)
    assert Failure("x", culprit=R0).by(trainer_id(2)).culprit == R0
    assert Failure.of(LATE).by(trainer_id(2)).culprit is None


GOOD = Failure("x").as_json()


@pytest.mark.parametrize(
    "fields",
    [
        None,
        "x",
        ["x", "unknown"],
        {},
        {name: value for name, value in GOOD.items() if name != "late"},
        {**GOOD, "text": 1},
        {**GOOD, "kind": None},
        {**GOOD, "culprit": 1},
        {**GOOD, "culprit": ["trainer"]},
        {**GOOD, "culprit": ["trainer", "1"]},
        {**GOOD, "culprit": ["driver", 1]},
        {**GOOD, "foreign": "no kind"},
        {**GOOD, "foreign": None},
        {**GOOD, "late": {}},
        {**GOOD, "late": "x"},
        {**GOOD, "late": {**LATE.as_json(), "waited_s": "x"}},
        {**GOOD, "late": {**LATE.as_json(), "missing": [1]}},
        {**GOOD, "late": {**LATE.as_json(), "awaited": []}},
        {**GOOD, "late": {**LATE.as_json(), "more": 1}},
    ],
)
def test_what_is_no_failure_is_refused(fields: Any) -> None:
    with pytest.raises(CommunicatorError, match="cannot be parsed, .*: start all ranks with the same version"):
        Failure.from_json(json.loads(json.dumps(fields)))
