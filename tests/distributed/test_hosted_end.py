"""The end of a rank under a host: each step of it runs, whatever became of the step before."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from rl_safe_workers.adapters.hosting import HostedTrainer
from rl_safe_workers.adapters.rank_answers import RankNotes
from rl_safe_workers.config import RlSafeConfig, RunConfig
from rl_safe_workers.errors import OUTSIDE, Awaited, CommunicatorError, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.workers import safe_trainer, world_entry
from rl_safe_workers.workers.communicators import HostComms
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config

TEARDOWN_S = 2.0


@pytest.fixture
def config(seeded_models) -> RunConfig:
    config = run_config(seeded_models["moe"])
    config.rl_safe.timeouts.teardown = TEARDOWN_S
    return config


class Hosted(HostedTrainer):
    """A host's process around a rank that has its world."""

    def __init__(self, worker: Worker) -> None:
        self._trainer = worker.safe
        self.notes = RankNotes(worker.safe)


def _aborts() -> list[bool]:
    """Returns a list that gets an item for each abort of the groups."""
    aborted: list[bool] = []
    safe_trainer.abort_groups = lambda *args, **kwargs: aborted.append(True)
    return aborted


def _without_a_secret(rank: int, address: StoreAddress) -> list[Any]:
    late = PhaseTimeoutError(phase=Phase.WORLD, awaited=Awaited("world"), waited_s=1.0, setting="timeouts.world")

    def no_secret(*args: Any, **kwargs: Any) -> NoReturn:
        raise late

    world_entry.SharedSecret = no_secret
    dist.init_process_group(
        "gloo", store=connect_store(address, timeout=timedelta(seconds=30)), rank=rank, world_size=1
    )
    aborted, hosted = _aborts(), HostedTrainer()
    with pytest.raises(PhaseTimeoutError):
        hosted.take_world(RlSafeConfig(), comms=HostComms(), outside_timeout=timedelta(seconds=30))
    with pytest.MonkeyPatch.context() as patch:
        warnings: list[str] = []
        patch.setattr("rl_safe_workers.adapters.hosting.logger.warning", lambda text, *args: warnings.append(text))
        patch.setattr("rl_safe_workers.adapters.hosting.logger.error", lambda text, *args: warnings.append(text))
        hosted.end_failed(late, Phase.WORLD)
    return [hosted.end("no secret"), aborted, warnings]


def test_a_rank_that_has_not_met_the_others_aborts_its_groups_and_keeps_its_own_error(address: StoreAddress) -> None:
    ((failed, aborted, warnings),) = values(run_ranks(_without_a_secret, 1, address))
    assert list(failed) == [0]
    assert "world" in failed[0]
    assert aborted == [True]
    assert warnings == []


def _cannot_report(rank: int, address: StoreAddress, config: RunConfig) -> list[Any]:
    worker = Worker(config, rank=rank, size=2)
    worker.start(address)
    hosted, aborted = Hosted(worker), _aborts()
    if rank == 0:
        return [hosted.end(), aborted]

    def no_report(*args: Any, **kwargs: Any) -> NoReturn:
        raise OSError("no report")

    worker.safe.control.report_failure = no_report
    hosted.end_failed(ValueError("out of range"), OUTSIDE)
    return [hosted.end(), aborted]


def test_a_rank_that_cannot_report_its_failure_still_gives_its_verdict_and_aborts(address, config) -> None:
    for failed, aborted in values(run_ranks(_cannot_report, 2, address, config)):
        assert failed == {1: "ValueError: out of range"}
        assert aborted == [True]


def _leaves_before_the_other(rank: int, address: StoreAddress, config: RunConfig) -> list[Any]:
    worker = Worker(config, rank=rank, size=2)
    worker.start(address)
    hosted, said = Hosted(worker), []
    if rank == 1:
        time.sleep(TEARDOWN_S + 2)
        return []
    hosted.say = lambda culprits, why: said.append(set(culprits))
    with pytest.raises(CommunicatorError) as raised:
        hosted.leave()
    return [str(raised.value), said]


def test_a_rank_that_does_not_end_with_the_others_is_named_and_blamed(address, config) -> None:
    (error, said), _silent = values(run_ranks(_leaves_before_the_other, 2, address, config))
    assert error == "this rank succeeded, but the job has failed: training rank 1: did not report in time"
    assert said == [{trainer_id(1)}]
