"""The communicators of Megatron and of a host share one deadline, and errors about them name one phase."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_safe_workers.comms.bootstrap import HostGroups
from rl_safe_workers.config import MegatronConfig, RlSafeConfig
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.topology.groups import OpClass
from rl_safe_workers.workers import communicators
from rl_safe_workers.workers.communicators import HostComms
from rl_safe_workers.workers.safe_trainer import SafeTrainer
from rl_safe_workers.worlds.training_world import TrainingWorld

TIMEOUT_S, TAKES_S = 1.0, 0.3


class Host(HostComms):
    """A host with a group of its own."""

    def groups(self) -> HostGroups:
        return [(None, "dp", (OpClass.REDUCE,))]


class Stopped(Exception):
    """Ends the bootstrap where the test has seen enough."""


def test_a_hosts_groups_get_the_rest_of_the_time_and_the_same_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, Phase]] = []

    class SlowBootstrap:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.connected: dict[str, Any] = {}

        def run(self, *, timeout: timedelta, phase: Phase, **others: Any) -> Any:
            seen.append((timeout.total_seconds(), phase))
            time.sleep(TAKES_S)
            return SimpleNamespace()

        def run_host(self, wanted: HostGroups, *, timeout: timedelta, phase: Phase = Phase.BOOTSTRAP) -> Any:
            seen.append((timeout.total_seconds(), phase))
            raise Stopped

    monkeypatch.setattr(communicators, "Bootstrap", SlowBootstrap)
    trainer = SafeTrainer(
        training_rank=0,
        training_size=1,
        rl_safe=RlSafeConfig(),
        megatron=MegatronConfig(),
        device=torch.device("cpu"),
        host_comms=Host(),
    )
    trainer.world = TrainingWorld(training_rank=0, size=1, joint_ranks=(0,))
    monkeypatch.setattr(SafeTrainer, "control", None)
    with pytest.raises(Stopped):
        trainer.comms.connect_all(None, phase=Phase.ONLOAD, timeout=timedelta(seconds=TIMEOUT_S))
    (first_s, _), (second_s, _) = seen
    assert first_s == pytest.approx(TIMEOUT_S, abs=0.1)
    assert second_s <= TIMEOUT_S - TAKES_S
    assert [phase for _, phase in seen] == [Phase.ONLOAD] * 2
