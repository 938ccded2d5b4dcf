"""What a worker raises becomes an error that says whose it is."""

from __future__ import annotations

from typing import Any

import pytest

from rl_safe_workers.driver.actors import ActorShell, RolloutActor, TrainerActor
from rl_safe_workers.errors import CheckpointError, CommunicatorError, RankError, WeightSyncError


class Worker:
    """Raises what it is told to."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.lifecycle = self

    def drain_events(self) -> list[Any]:
        return []

    def work(self) -> None:
        raise self._error


def error_of(shell: ActorShell, error: Exception) -> RankError:
    shell._worker = Worker(error)
    found = shell.call("train", "work", ()).error
    assert isinstance(found, RankError)
    return found


@pytest.mark.parametrize(
    ("error", "in_vain"),
    [
        (RuntimeError("Timed out waiting 1000ms for send operation to complete"), True),
        (RuntimeError("[3] Connection closed by peer [127.0.0.1]:1"), True),
        (CommunicatorError("phase sync: training rank 1 has lost the run's store"), True),
        (WeightSyncError("joint rank 0: its pair did not keep up: timed out"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (OSError(110, "Connection timed out", "/nfs/checkpoints"), False),
        (CheckpointError("OSError: Connection timed out"), False),
    ],
)
def test_a_wait_in_vain_is_told_from_a_file_system_that_is_gone(error: Exception, in_vain: bool) -> None:
    assert error_of(TrainerActor(None, 1), error).in_vain is in_vain


@pytest.mark.parametrize(
    ("shell", "culprit", "follows"),
    [(TrainerActor, 1, False), (TrainerActor, 3, True), (TrainerActor, None, False), (RolloutActor, 3, False)],
)
def test_an_error_about_another_rank_only_follows(shell: type[ActorShell], culprit: int | None, follows: bool) -> None:
    error = CommunicatorError("training rank 3 failed in A: no", culprit=culprit)
    assert error_of(shell(None, 1), error).follows is follows
