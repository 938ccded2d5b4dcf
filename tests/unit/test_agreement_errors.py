"""Which error an agreement raises on each rank, if one of them has failed. Two ranks as threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from rl_safe_workers.checkpoint.failures import as_checkpoint_error, checkpoint_errors
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
from rl_safe_workers.worlds.agreement import Agreement

PATIENCE = timedelta(seconds=20)


def settled(failures: list[Exception | None], decide: Callable[[Any], Any] = list, **arguments: Any) -> list[Any]:
    """What the agreement comes to on each rank: its value or its error."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)

    def settle(rank: int) -> Any:
        store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
        agreement = Agreement(store, "x", phase=Phase.CONVERT, rank=rank, size=2)
        try:
            return agreement.settle(arguments.get("timeout", PATIENCE), failure=failures[rank], decide=decide)
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
        (as_checkpoint_error(ValueError("no")), CheckpointError),
    ],
)
def test_a_failure_keeps_its_class_on_every_rank(failure: Exception, kind: type[RlSafeError]) -> None:
    other, own = settled([None, failure])
    assert (type(own), type(other)) == (kind, kind)
    assert own is failure or own.__cause__ is failure
    assert (other.culprit, own.culprit) == (trainer_id(1), None)
    assert str(other) == f"training rank 1: {own}"


@pytest.mark.parametrize(("guard", "kind"), [(lambda decide: decide, RunError), (checkpoint_errors(), CheckpointError)])
def test_a_decision_that_fails_is_the_failure_of_training_rank_0(guard: Any, kind: type[RlSafeError]) -> None:
    def decide(reports: Any) -> Any:
        raise ValueError("no")

    for error in settled([None, None], guard(decide)):
        assert (type(error), error.culprit, str(error)) == (kind, trainer_id(0), "ValueError: no")


def test_a_rank_that_does_not_report_is_missing() -> None:
    (error,) = settled([None], timeout=timedelta(seconds=0.2))
    assert isinstance(error, PhaseTimeoutError)
    assert (error.awaited.members, error.missing) == (set(trainer_ids([0, 1])), {trainer_id(1)})


def test_an_error_of_ours_is_no_cause_of_itself() -> None:
    failure = CommunicatorError("no")
    settled([None, failure])
    assert failure.__cause__ is None
