"""An error of a worker becomes an error that names the worker."""

from __future__ import annotations

from typing import Any

import pytest

from rl_safe_workers.driver.cluster.actors import ActorShell, RolloutActor, TrainerActor
from rl_safe_workers.errors import (
    Awaited,
    Cause,
    CommunicatorError,
    PhaseTimeoutError,
    Raised,
    RankError,
    Repeats,
    Victim,
)
from rl_safe_workers.ranks import RankId, trainer_id

pytestmark = pytest.mark.usefixtures("without_messages")


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
    ("shell", "error", "cause"),
    [
        (TrainerActor, RuntimeError("[/x/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), Victim()),
        (TrainerActor, RuntimeError("CUDA error: device-side assert triggered"), Raised()),
        (TrainerActor, CommunicatorError("no", culprit=trainer_id(1)), Raised()),
        (TrainerActor, CommunicatorError("no", culprit=trainer_id(3)), Repeats(trainer_id(3))),
        (RolloutActor, CommunicatorError("no", culprit=trainer_id(1)), Repeats(trainer_id(1))),
    ],
)
def test_an_error_carries_whose_it_is_and_how_it_came(shell: type[ActorShell], error: Exception, cause: Cause) -> None:
    found = error_of(shell(None, 1), error)
    assert (found.rank_id, found.phase, found.cause) == (RankId(shell.role, 1), "train", cause)
    assert found.text == f"{type(error).__name__}: {error}"
    assert "work" in found.trace


def test_a_timeout_that_names_ranks_stays_as_it_is() -> None:
    late = PhaseTimeoutError(
        phase="train", awaited=Awaited("x"), missing=[trainer_id(0)], waited_s=1.0, setting="rl_safe.timeouts.train"
    )
    shell = TrainerActor(None, 1)
    shell._worker = Worker(late)
    assert shell.call("train", "work", ()).error is late
