"""Communicators are suspended and resumed in step, where NCCL can; here its backend is a fake that keeps a record."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_safe_workers.comms import suspend
from rl_safe_workers.comms.live_groups import LiveGroup, live_groups
from rl_safe_workers.comms.suspend import Suspension
from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config

SIZE, CPU = 4, torch.device("cpu")
TIMEOUT, GPU_TIMEOUT = timedelta(seconds=10), timedelta(seconds=6)


class Recorder:
    """Stands for the NCCL backend of a group."""

    def __init__(self, record: list[tuple[str, str]], name: str, fails: bool) -> None:
        self._record, self._name, self._fails = record, name, fails

    def suspend(self) -> None:
        if self._fails:
            raise RuntimeError("NCCL is busy")
        self._record.append(("suspend", self._name))

    def resume(self) -> None:
        self._record.append(("resume", self._name))


def _cycle(rank: int, address: StoreAddress, config: RunConfig, failing: int | None, number: int = 0) -> dict[str, Any]:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    record: list[tuple[str, str]] = []
    groups: list[LiveGroup] = [group for group in live_groups() if worker.safe.comms.is_connected(group)]
    by_id = {id(group.group): str(group) for group in groups}
    broken = by_id[id(groups[number].group)]
    suspend._backend = lambda group, device: Recorder(
        record, by_id[id(group)], fails=rank == failing and by_id[id(group)] == broken
    )
    suspension = Suspension(worker.safe.control, device=CPU)
    error = ""
    try:
        suspension.suspend(worker.safe.comms.is_connected, timeout=TIMEOUT)
        suspension.suspend(worker.safe.comms.is_connected, timeout=TIMEOUT)
    except CommunicatorError as raised:
        error = str(raised)
    suspension.resume(timeout=TIMEOUT)
    suspension.resume(timeout=TIMEOUT)
    return {"record": record, "groups": [str(group) for group in groups], "error": error}


def test_every_connected_group_is_suspended_once_and_then_resumed(address, seeded_models) -> None:
    config = run_config(seeded_models["moe"], pp=2, ep=2)
    for found in values(run_ranks(_cycle, SIZE, address, config, None)):
        suspended, resumed = found["record"][: len(found["groups"])], found["record"][len(found["groups"]) :]
        assert sorted(suspended) == sorted(("suspend", name) for name in found["groups"])
        assert sorted(resumed) == sorted(("resume", name) for name in found["groups"])
        assert len(found["groups"]) > 5


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_a_rank_that_cannot_is_named_by_all_and_what_was_suspended_comes_back(
    number: int, address, seeded_models
) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    for found in values(run_ranks(_cycle, SIZE, address, config, 1, number)):
        assert "training rank 1 failed" in found["error"]
        assert "NCCL is busy" in found["error"]
        suspended = {name for what, name in found["record"] if what == "suspend"}
        assert {name for what, name in found["record"] if what == "resume"} == suspended


def _wait_for_a_gpu(rank: int, address: StoreAddress, config: RunConfig, stuck: int | None) -> dict[str, Any]:
    """As on GPUs; on one rank a kernel never ends."""
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    record: list[tuple[str, str]] = []

    def synchronize(device: torch.device) -> None:
        if rank == stuck:
            threading.Event().wait()
        record.append(("synchronize", str(device)))

    torch.cuda.synchronize = synchronize  # type: ignore[assignment]
    suspend._backend = lambda group, device: Recorder(record, "group", fails=False)
    suspension = Suspension(worker.safe.control, device=torch.device("cuda", 0))
    error, started_s = "", time.monotonic()
    try:
        suspension.suspend(worker.safe.comms.is_connected, timeout=GPU_TIMEOUT)
    except CommunicatorError as raised:
        error = str(raised)
    seconds = time.monotonic() - started_s
    suspension.resume(timeout=GPU_TIMEOUT)
    return {"record": [what for what, _ in record], "error": error, "seconds": seconds}


def test_the_gpu_is_waited_for_before_a_group_is_suspended_and_not_when_it_is_resumed(address, seeded_models) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    for found in values(run_ranks(_wait_for_a_gpu, SIZE, address, config, None)):
        assert found["record"][:2] == ["synchronize", "suspend"]
        assert found["record"].count("synchronize") == 1
        assert found["record"].count("resume") == found["record"].count("suspend")


def test_a_gpu_that_does_not_finish_is_named_by_all_in_time_and_the_groups_come_back(address, seeded_models) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    for found in values(run_ranks(_wait_for_a_gpu, SIZE, address, config, 1, timeout_s=60)):
        assert "training rank 1 failed in the wait for its GPU" in found["error"]
        assert "what is queued on the GPU did not end within 4.8 s" in found["error"]
        assert found["seconds"] < GPU_TIMEOUT.total_seconds()
        assert found["record"].count("resume") == found["record"].count("suspend")


def _prove(
    rank: int, address: StoreAddress, config: RunConfig, refusing: int | None, spoilt: int | None
) -> dict[str, Any]:
    """On rank ``spoilt``, the second sum is another one."""
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    record: list[tuple[str, str]] = []
    suspend._backend = lambda group, device: Recorder(record, "WORLD", fails=rank == refusing)
    sums: list[torch.Tensor] = []
    all_reduce = dist.all_reduce

    def noted(values: torch.Tensor, **options: Any) -> None:
        all_reduce(values, **options)
        if sums and rank == spoilt:
            values += 1.0
        sums.append(values)

    suspend.dist.all_reduce = noted  # type: ignore[attr-defined]
    try:
        proven: object = Suspension(worker.safe.control, device=CPU).prove(timeout=TIMEOUT)
    except CommunicatorError as error:
        proven = str(error)
    return {"proven": proven, "record": record, "sums": len(sums)}


def test_suspending_is_proven_by_two_equal_sums_over_the_default_group(address, seeded_models) -> None:
    for found in values(run_ranks(_prove, SIZE, address, run_config(seeded_models["moe"], ep=2), None, None)):
        assert found["proven"] is True
        assert found["record"] == [("suspend", "WORLD"), ("resume", "WORLD")]
        assert found["sums"] == 2


def test_if_nccl_refuses_on_one_rank_no_rank_suspends_and_the_group_still_works(address, seeded_models) -> None:
    found = values(run_ranks(_prove, SIZE, address, run_config(seeded_models["moe"], ep=2), 1, None))
    for rank, of_rank in enumerate(found):
        assert of_rank["proven"] is False
        assert of_rank["sums"] == 2
        assert of_rank["record"] == ([] if rank == 1 else [("suspend", "WORLD"), ("resume", "WORLD")])


def test_another_sum_on_one_rank_is_an_error_on_every_rank(address, seeded_models) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    for found in values(run_ranks(_prove, SIZE, address, config, None, 1)):
        assert "training rank 1 failed in " in found["proven"]
        assert found["proven"].endswith(": an all_reduce after suspend and resume gave another sum")
