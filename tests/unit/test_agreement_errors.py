"""Which error an agreement raises on each rank, if one of them has failed. Two ranks as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.control.seal import new_secret
from rl_safe_workers.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CommunicatorError,
    ConfigError,
    PhaseTimeoutError,
    RlSafeError,
    RunError,
)
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id, trainer_ids

PATIENCE = timedelta(seconds=20)


def settled(
    failures: list[Exception | None],
    decide: Callable[[Any], Any] = list,
    *,
    timeout: timedelta = PATIENCE,
    foreign: type[RlSafeError] = RunError,
) -> list[Any]:
    """Returns the outcome of the agreement on each rank: its value or its error."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    secret, members = new_secret(), trainer_ids(range(2))

    def settle(rank: int) -> Any:
        store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
        control = ControlPlane(store, world="training world", rank=rank, members=members, secret=secret)
        try:
            gathering = control.gathering("x", phase=Phase.CONVERT)
            return gathering.settle(Deadline.after(timeout), failure=failures[rank], decide=decide, foreign=foreign)
        except RlSafeError as error:
            return error

    with ThreadPoolExecutor() as pool:
        return list(pool.map(settle, range(len(failures))))


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (ValueError("no"), RunError),
        (OSError(28, "No space left on device"), RunError),
        (CommunicatorError("no"), CommunicatorError),
        (CheckpointMismatchError("no"), CheckpointMismatchError),
        (ConfigError("no"), ConfigError),
    ],
)
def test_a_failure_keeps_its_class_on_every_rank(failure: Exception, kind: type[RlSafeError]) -> None:
    other, own = settled([None, failure])
    assert (type(own), type(other)) == (kind, kind)
    assert own is failure or own.__cause__ is failure
    assert (other.culprit, own.culprit) == (trainer_id(1), None)
    assert str(other) == f"training rank 1: {own}"


@pytest.mark.parametrize("kind", [RunError, CheckpointError])
def test_a_foreign_failure_is_of_the_kind_that_the_caller_names(kind: type[RlSafeError]) -> None:
    assert [type(error) for error in settled([None, ValueError("no")], foreign=kind)] == [kind, kind]


@pytest.mark.parametrize("kind", [RunError, CheckpointError])
def test_a_decision_that_fails_is_the_failure_of_training_rank_0(kind: type[RlSafeError]) -> None:
    def decide(reports: Any) -> Any:
        raise ValueError("no")

    for error in settled([None, None], decide, foreign=kind):
        assert (type(error), error.culprit, str(error)) == (kind, trainer_id(0), "ValueError: no")


def test_a_rank_that_does_not_report_is_missing() -> None:
    (error,) = settled([None], timeout=timedelta(seconds=0.2))
    assert isinstance(error, PhaseTimeoutError)
    assert (error.awaited.members, error.missing) == (set(trainer_ids([0, 1])), {trainer_id(1)})


def test_an_error_of_ours_is_no_cause_of_itself() -> None:
    failure = CommunicatorError("no")
    settled([None, failure])
    assert failure.__cause__ is None
