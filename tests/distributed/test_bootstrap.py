"""The bootstrap connects everything that a run uses, expert data-parallel groups first, or nothing at all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from megatron.core import parallel_state

from rl_safe_workers.comms.catalog import EXPERT_DATA_PARALLEL, OpClass, live_groups, op_classes
from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import CommunicatorError, LifecycleError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.distributed.recording import Collective, is_connected, recorded_collectives
from tests.distributed.worker import Worker, run_config, served_store

SIZE = 4
LAYOUTS = {"tp1_ep2": {"ep": 2}, "tp2_ep2": {"tp": 2, "ep": 2}, "pp2_ep2": {"pp": 2, "ep": 2}}
REDUCE, GATHER, ALL_TO_ALL, P2P = OpClass.REDUCE, OpClass.GATHER_SCATTER, OpClass.ALL_TO_ALL, OpClass.P2P


def _worker(rank: int, address: StoreAddress, config: RunConfig) -> Worker:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.init_world(address, backend="gloo")
    worker.init_groups(seed=0)
    return worker


def _use_everything(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> dict[str, Any]:
    worker = _worker(rank, address, config)
    groups = [(g.description, g.ranks) for g in live_groups() if g.size > 1]
    with recorded_collectives() as bootstrap:
        reports = [worker.bootstrap()]
    with recorded_collectives() as again:
        reports.append(worker.bootstrap())
    with recorded_collectives() as used:
        worker.convert()
        worker.compute_logprobs(worker.shard(reference.random_batch(rows=8)))
        worker.step(reference.random_batch(rows=8))
        worker.weight_specs()
        worker.offload()
        worker.onload()
        worker.save_checkpoint(root, step=1, fingerprint="", layout={}, driver_state={})
    worker.teardown()
    return {"groups": groups, "bootstrap": bootstrap, "again": again, "used": used, "reports": reports}


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request, seeded_models, tmp_path_factory) -> list[dict[str, Any]]:
    config = run_config(seeded_models["moe"], **LAYOUTS[request.param])
    with served_store() as address:
        return values(run_ranks(_use_everything, SIZE, address, config, tmp_path_factory.mktemp("checkpoints")))


def _connections(collectives: list[Collective]) -> set[tuple[str, tuple[int, ...], OpClass]]:
    return {collective.connection for collective in collectives}


def _without_world(connections: set[Any]) -> set[Any]:
    return {c for c in connections if c[0] != "default_pg"}


def test_the_first_collective_is_on_the_expert_data_parallel_group(ranks) -> None:
    # PP2 EP2 on four ranks leaves one rank to each of these groups.
    held = [r for r in ranks if any(name == EXPERT_DATA_PARALLEL for name, _ in r["groups"])]
    assert {r["bootstrap"][0].group for r in held} <= {EXPERT_DATA_PARALLEL}
    assert len(held) == (0 if any("PIPELINE_MODEL_PARALLEL_GROUP" in dict(r["groups"]) for r in ranks) else SIZE)


def test_every_group_of_several_ranks_gets_each_of_its_op_classes(ranks) -> None:
    for r in ranks:
        expected = {
            (name.replace("WORLD", "default_pg"), members, op_class)
            for name, members in r["groups"]
            for op_class in op_classes(name, moe_dispatcher="alltoall")
        }
        if "PIPELINE_MODEL_PARALLEL_GROUP" in dict(r["groups"]):
            # At two stages Megatron sends one of the directions over the default group.
            expected.add(("default_pg", tuple(range(SIZE)), P2P))
        assert _connections(r["bootstrap"]) == expected


def test_nothing_that_a_run_uses_was_left_unconnected(ranks) -> None:
    for r in ranks:
        several = {c for c in _connections(r["used"]) if len(c[1]) > 1}
        assert several - _connections(r["bootstrap"]) == set()
        assert len(_without_world(several)) >= 3


def test_a_second_bootstrap_repeats_the_first(ranks) -> None:
    for r in ranks:
        assert r["again"] == r["bootstrap"]
        assert r["reports"][0].groups == r["reports"][1].groups == len(r["groups"])


@pytest.mark.parametrize(
    ("description", "dispatcher", "expected"),
    [
        ("WORLD", "alltoall", {REDUCE, GATHER}),
        (EXPERT_DATA_PARALLEL, "alltoall", {REDUCE, GATHER}),
        ("EXPERT_MODEL_PARALLEL_GROUP", "alltoall", {REDUCE, GATHER, ALL_TO_ALL}),
        ("EXPERT_MODEL_PARALLEL_GROUP", "allgather", {REDUCE, GATHER}),
        ("TENSOR_MODEL_PARALLEL_GROUP", "alltoall", {REDUCE, GATHER}),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "alltoall", {REDUCE, GATHER, P2P}),
    ],
)
def test_op_classes_follow_from_what_a_group_is_for(description, dispatcher, expected) -> None:
    assert set(op_classes(description, moe_dispatcher=dispatcher)) == expected


def _disagree(rank: int, address: StoreAddress, config: RunConfig) -> tuple[str, int]:
    if rank == 1:
        config.megatron.moe_token_dispatcher_type = "allgather"
    worker = _worker(rank, address, config)
    with recorded_collectives() as collectives:
        try:
            worker.bootstrap()
        except CommunicatorError as error:
            return str(error), len(collectives)
    return "", len(collectives)


def test_plans_that_differ_are_refused_on_every_rank_before_any_collective(address, seeded_models) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    outcomes = values(run_ranks(_disagree, SIZE, address, config, timeout_s=30))
    for message, collectives in outcomes:
        assert "EXPERT_MODEL_PARALLEL_GROUP" in message
        assert collectives == 0


def _rebuild(rank: int, address: StoreAddress, config: RunConfig) -> bool:
    worker = _worker(rank, address, config)
    worker.bootstrap()
    parallel_state.destroy_model_parallel()
    worker.megatron.moe_token_dispatcher_type = "allgather"
    worker.init_groups(seed=0)
    known = worker.lifecycle.has_completed(Phase.BOOTSTRAP)
    arrive = worker.roll_call.arrive

    def arrive_and_dawdle(*args: Any, **kwargs: Any) -> None:
        arrive(*args, **kwargs)
        time.sleep(0.2 * rank)

    worker.roll_call.arrive = arrive_and_dawdle
    worker.bootstrap()
    return known


def test_rebuilt_groups_need_a_bootstrap_and_its_plans_are_not_taken_for_the_old_ones(address, seeded_models) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    assert values(run_ranks(_rebuild, SIZE, address, config)) == [False] * SIZE


def _lag(rank: int, address: StoreAddress, config: RunConfig) -> None:
    worker = _worker(rank, address, config)
    if rank == 2:
        worker.roll_call.arrive(Phase.BOOTSTRAP, timeout=worker.timeout(Phase.BOOTSTRAP))
        time.sleep(1.5)
    worker.bootstrap()


def test_a_rank_without_a_plan_is_named(address, seeded_models) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    config.rl_safe.timeouts.bootstrap = 1.0
    errors = [outcome.error for outcome in run_ranks(_lag, SIZE, address, config, timeout_s=30)]
    assert isinstance(errors[1], CommunicatorError)
    assert "training rank 2 published no plan within 1 s" in str(errors[1])


def _offload_first(rank: int, address: StoreAddress, config: RunConfig) -> tuple[str, bool]:
    worker = _worker(rank, address, config)
    try:
        worker.offload()
    except LifecycleError as error:
        return str(error), is_connected(live_groups()[0].group)
    return "", is_connected(live_groups()[0].group)


def test_an_offload_before_the_bootstrap_is_refused(address, seeded_models) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    for message, connected in values(run_ranks(_offload_first, SIZE, address, config)):
        assert "the bootstrap has not run" in message
        assert "rl_safe.bootstrap.on_missing=bootstrap" in message
        assert not connected


def _offload_bootstraps(rank: int, address: StoreAddress, config: RunConfig) -> list[bool]:
    worker = _worker(rank, address, config)
    worker.bootstrap()
    worker.convert()
    worker.lifecycle.invalidate(Phase.BOOTSTRAP)
    with recorded_collectives() as collectives:
        worker.offload()
    return [worker.lifecycle.has_completed(Phase.BOOTSTRAP), worker.is_offloaded, len(collectives) > 0]


def test_an_offload_bootstraps_first_if_so_configured(address, seeded_models) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    config.rl_safe.bootstrap.on_missing = "bootstrap"
    assert values(run_ranks(_offload_bootstraps, SIZE, address, config)) == [[True] * 3] * SIZE
