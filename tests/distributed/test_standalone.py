"""The three functions for a script without Ray: what they connect, whom they name, and how they end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers import bootstrap, guard, standalone, teardown
from rl_safe_workers.comms.report import BootstrapReport
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import CommunicatorError, ConfigError, PhaseTimeoutError
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.topology.groups import Features, OpClass
from rl_safe_workers.topology.memory import MIB
from rl_safe_workers.workers import safe_trainer
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store
from rl_safe_workers.worlds.training_world import device_of_world
from tests.distributed.ranks import run_ranks, values

SIZE = 4
PATIENCE = timedelta(seconds=60)
EP2 = {"expert_model_parallel_size": 2}
BETWEEN_INSTANCES = "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1"
BOTH = {OpClass.REDUCE, OpClass.GATHER_SCATTER}


def _begin(rank: int, address: StoreAddress, **sizes: int) -> None:
    """Does the part of a script before its first line of ours."""
    store = connect_store(address, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)


def _connected(report: BootstrapReport) -> dict[str, set[OpClass]]:
    found: dict[str, set[OpClass]] = {}
    for entry in report.entries:
        found.setdefault(entry.group, set()).add(entry.op_class)
    return found


def _gather_a_plan(rank: int, address: StoreAddress, background_saves: bool) -> str:
    """Does what an asynchronous save of Megatron's does over the default group; returns the error of the guard."""
    _begin(rank, address, **EP2)
    bootstrap(features=Features(moe=True, background_saves=background_saves))
    plans = [None] * SIZE
    try:
        with guard("save", refuse=True):
            dist.gather_object({"rank": rank}, plans if rank == 0 else None, dst=0)
            dist.scatter_object_list(received := [None], plans if rank == 0 else None, src=0)
    except CommunicatorError as error:
        return str(error)
    assert received == [{"rank": rank}]
    return ""


def test_the_gather_of_an_asynchronous_save_is_connected_if_the_script_says_so(address: StoreAddress) -> None:
    assert values(run_ranks(_gather_a_plan, SIZE, address, True)) == [""] * SIZE


def test_the_gather_of_an_asynchronous_save_is_named_if_the_script_does_not_say_so(address: StoreAddress) -> None:
    for error in values(run_ranks(_gather_a_plan, SIZE, address, False)):
        assert "(root_exchange) on default_pg [0, 1, 2, 3] in phase save" in error


def _two_instances(rank: int, address: StoreAddress, features: Features | None) -> dict[str, set[OpClass]]:
    _begin(rank, address, **EP2, num_distributed_optimizer_instances=2)
    report = bootstrap(features=features, max_ctas={"inter_ep_dp": 8})
    between = parallel_state.get_inter_distributed_optimizer_instance_group()
    with guard("train", refuse=True):
        dist.all_reduce(torch.ones(1), group=between)
        dist.all_gather_into_tensor(torch.ones(2), torch.ones(1), group=between)
    teardown()
    return _connected(report)


@pytest.mark.parametrize("features", [None, Features(moe=True)], ids=["no features", "features that do not say"])
def test_the_group_between_optimizer_instances_is_connected_because_megatron_has_it(features, address) -> None:
    for connected in values(run_ranks(_two_instances, SIZE, address, features)):
        assert connected[BETWEEN_INSTANCES] == BOTH


def _sends(rank: int, address: StoreAddress, virtual: int | None) -> list[int]:
    """The stages that this one has sent to, one by one."""
    _begin(
        rank,
        address,
        pipeline_model_parallel_size=SIZE,
        virtual_pipeline_model_parallel_size=virtual,
    )
    with mock.patch.object(dist, "send", wraps=dist.send) as send:
        bootstrap()
    teardown()
    return sorted({call.kwargs["dst"] for call in send.call_args_list})


@pytest.mark.parametrize(("virtual", "last_sends_to"), [(None, [2]), (2, [0, 2])])
def test_the_last_stage_is_connected_to_the_first_where_megatron_has_virtual_stages(
    virtual, last_sends_to, address
) -> None:
    assert values(run_ranks(_sends, SIZE, address, virtual))[-1] == last_sends_to


def _groups_at_tp2(rank: int, address: StoreAddress, features: Features | None) -> dict[str, set[OpClass]]:
    _begin(rank, address, tensor_model_parallel_size=2)
    report = bootstrap(features=features)
    teardown()
    return _connected(report)


UNKNOWN_TO_MEGATRONS_GROUPS = {
    "MODEL_PARALLEL_GROUP": {OpClass.REDUCE},  # a plain optimizer
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": {OpClass.REDUCE},  # fp8, an expert bias or a load-balancing loss
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": {OpClass.REDUCE},  # fp8 or a load-balancing loss
    "EXPERT_TENSOR_PARALLEL_GROUP": BOTH,  # experts
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": BOTH,
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": {OpClass.REDUCE},
}


def test_what_megatrons_groups_do_not_tell_is_taken_for_what_connects_more(address) -> None:
    for connected in values(run_ranks(_groups_at_tp2, SIZE, address, None)):
        assert {name: connected.get(name) for name in UNKNOWN_TO_MEGATRONS_GROUPS} == UNKNOWN_TO_MEGATRONS_GROUPS


def test_features_that_are_given_decide_it(address) -> None:
    for connected in values(run_ranks(_groups_at_tp2, SIZE, address, Features(moe=False))):
        assert not UNKNOWN_TO_MEGATRONS_GROUPS.keys() & connected.keys()


@pytest.mark.parametrize(
    ("backends", "has_gpu", "expected"),
    [
        ("cuda:nccl", True, "cuda:3"),
        ("cpu:gloo,cuda:nccl", True, "cuda:3"),  # init_process_group() without a backend, whose name is "undefined"
        ("cpu:rl_safe_nccl,cuda:rl_safe_nccl", True, "cuda:3"),
        ("cpu:gloo,cuda:gloo", True, "cpu"),
        ("cpu:gloo", True, "cpu"),
        ("cpu:gloo,cuda:nccl", False, "cpu"),
    ],
)
def test_the_device_is_this_processs_gpu_if_the_default_group_has_nccl(
    backends, has_gpu, expected, monkeypatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(dist, "get_backend", lambda: "undefined")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of_world() == torch.device(expected)


def _begin_with_room(rank: int, address: StoreAddress, mib: int, features: Features | None, narrow: int) -> str:
    """Has a rank with that much memory free, and others with plenty; returns why the bootstrap was refused."""
    _begin(rank, address, **EP2)
    standalone._room = lambda device: (mib if rank == narrow else 2**20) * MIB
    started_s = time.monotonic()
    try:
        bootstrap(features=features, timeout=PATIENCE)
    except CommunicatorError as error:
        assert time.monotonic() - started_s < PATIENCE.total_seconds() / 4
        return str(error)
    return ""


@pytest.mark.parametrize(("features", "mib"), [(Features(), 4194), (None, 5550)], ids=["features", "no features"])
def test_a_rank_without_room_for_groups_that_no_budget_limits_refuses_the_bootstrap_on_all(
    features, mib, address
) -> None:
    messages = values(run_ranks(_begin_with_room, SIZE, address, mib - 1, features, 2))
    text = f"the communicators will take {mib} MiB of device memory and {mib - 1} MiB are free"
    assert [message.startswith(text) for message in messages] == [False, False, True, False]
    assert [message.startswith(f"bootstrap: rank 2: {text}") for message in messages] == [True, True, False, True]
    assert all("that channel_limits(max_ctas=...) returns" in message for message in messages)


def test_a_rank_with_just_enough_room_is_not_refused(address) -> None:
    assert values(run_ranks(_begin_with_room, SIZE, address, 4194, Features(), 2)) == [""] * SIZE


def _one_names_no_group(rank: int, address: StoreAddress) -> Exception:
    _begin(rank, address, **EP2)
    started_s = time.monotonic()
    with pytest.raises((ConfigError, CommunicatorError)) as raised:
        bootstrap(max_ctas={"ep_pd": 8} if rank == 1 else {"ep_dp": 8}, timeout=PATIENCE)
    assert time.monotonic() - started_s < PATIENCE.total_seconds() / 4
    return raised.value


def test_a_rank_that_cannot_plan_tells_the_others_and_keeps_its_own_error(address) -> None:
    others = values(run_ranks(_one_names_no_group, SIZE, address))
    own = others.pop(1)
    assert isinstance(own, ConfigError)
    for error in others:
        assert isinstance(error, CommunicatorError)
        assert str(error) == f"bootstrap: rank 1: {own}"


def _one_does_not_come(rank: int, address: StoreAddress) -> tuple[int, ...]:
    _begin(rank, address, **EP2)
    if rank == 3:
        time.sleep(4)
        return (3,)
    with pytest.raises(PhaseTimeoutError) as raised:
        bootstrap(timeout=timedelta(seconds=2))
    return tuple(one.rank for one in sorted(raised.value.missing))


def test_a_rank_that_does_not_come_to_the_bootstrap_is_named_by_all(address) -> None:
    assert values(run_ranks(_one_does_not_come, SIZE, address)) == [(3,)] * SIZE


def _leave(rank: int, address: StoreAddress, leave: Callable[[], Any], timeout: timedelta) -> dict[str, Any]:
    """Trains; rank 2 leaves its own way. Returns how each call of two teardowns ended, and what was aborted."""
    _begin(rank, address, **EP2)
    found: dict[str, Any] = {}
    with mock.patch.object(safe_trainer, "abort_groups", wraps=safe_trainer.abort_groups) as abort:
        try:
            try:
                bootstrap()
                if rank == 2:
                    leave()
            finally:
                started_s = time.monotonic()
                try:
                    teardown(timeout=timeout)
                finally:
                    found["took_s"] = time.monotonic() - started_s
        except BaseException as error:
            found["first"] = error
        found["initialised"] = dist.is_initialized()
        try:
            try:
                raise KeyError("on its way")
            finally:
                teardown(timeout=timeout)
        except Exception as error:
            found["on an exception"] = error
        try:
            teardown(timeout=timeout)
        except Exception as error:
            found["second"] = error
    return found | {"aborts": abort.call_count}


@pytest.mark.parametrize("code", [None, 0])
def test_an_exit_without_an_error_code_is_an_orderly_end(code, address) -> None:
    ends = values(run_ranks(_leave, SIZE, address, partial(sys.exit, code), PATIENCE))
    assert [type(end.get("first")) for end in ends] == [type(None), type(None), SystemExit, type(None)]
    for end in ends:
        assert not end["initialised"]
        assert end["aborts"] == 0
        assert "second" not in end


@pytest.mark.parametrize("code", [3, "no"])
def test_an_exit_with_an_error_code_is_a_failure_that_every_later_call_tells(code, address) -> None:
    ends = values(run_ranks(_leave, SIZE, address, partial(sys.exit, code), PATIENCE))
    for rank, end in enumerate(ends):
        assert isinstance(end["first"], SystemExit if rank == 2 else CommunicatorError)
        assert isinstance(end["on an exception"], KeyError)
        assert isinstance(end["second"], CommunicatorError)
        assert f"rank 2 SystemExit: {code}" in str(end["second"])
        assert end["initialised"]
        assert end["aborts"] == 1
        assert end["took_s"] < PATIENCE.total_seconds() / 4


TEARDOWN = timedelta(seconds=4)


def _be_late_and_die_after_the_verdict() -> None:
    ControlPlane.barrier = lambda *args, **kwargs: os._exit(1)
    time.sleep(3)


def test_a_rank_lost_after_its_verdict_is_named_within_the_deadline_and_the_groups_are_aborted(address) -> None:
    outcomes = run_ranks(_leave, SIZE, address, _be_late_and_die_after_the_verdict, TEARDOWN)
    for end in values([outcome for outcome in outcomes if outcome.rank != 2]):
        assert isinstance(end["first"], PhaseTimeoutError)
        assert end["first"].missing == {trainer_id(2)}
        # Those before have waited three seconds for its verdict: not as long again for its arrival.
        assert TEARDOWN.total_seconds() - 0.5 < end["took_s"] < TEARDOWN.total_seconds() + 1
        assert end["initialised"]
        assert end["aborts"] == 1
        assert isinstance(end["on an exception"], KeyError)
        assert isinstance(end["second"], CommunicatorError)
        assert "rank 2 of training world did not arrive" in str(end["second"])


def _occupy_the_groups_connection_and_fail() -> None:
    """As a first collective of NCCL's that waits for a peer does, in a thread that a bootstrap has left behind."""
    threading.Thread(target=c10d._get_default_store().get, args=("what nobody sets",), daemon=True).start()
    time.sleep(0.5)
    raise RuntimeError("no more disk")


def test_a_teardown_needs_no_connection_that_a_collective_may_occupy(address) -> None:
    ends = values(run_ranks(_leave, SIZE, address, _occupy_the_groups_connection_and_fail, PATIENCE, timeout_s=30))
    assert [type(end["first"]) for end in ends] == [
        CommunicatorError,
        CommunicatorError,
        RuntimeError,
        CommunicatorError,
    ]
    assert max(end["took_s"] for end in ends) < PATIENCE.total_seconds() / 4
