"""The first steps find device memory that the bootstrap missed, tell it once, and refuse it if configured so."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_safe_workers.comms.bootstrap import Bootstrap
from rl_safe_workers.comms.late import ALWAYS_READ, NOTICED_BYTES, READING_S, LateWatch
from rl_safe_workers.comms.trace import op_class
from rl_safe_workers.config import RunConfig, SeededModelConfig
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.models.seeded import Family, create_seeded_model
from rl_safe_workers.recipe import load_recipe
from rl_safe_workers.topology.groups import OpClass
from rl_safe_workers.trainer.trainer_worker import TrainerWorker
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
PATIENCE = timedelta(seconds=30)
REDUCE, GATHER, ALL_TO_ALL = OpClass.REDUCE, OpClass.GATHER_SCATTER, OpClass.ALL_TO_ALL


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("allreduce_", REDUCE),
        ("broadcast_", REDUCE),
        ("barrier", REDUCE),
        ("reduce_", REDUCE),
        ("_allgather_base_", GATHER),
        ("allgather_into_tensor_coalesced_", GATHER),
        ("all_gather_single_", GATHER),
        ("_reduce_scatter_base_", GATHER),
        ("reduce_scatter_tensor_coalesced_", GATHER),
        ("alltoall_base_", ALL_TO_ALL),
        ("all_to_all_single_", ALL_TO_ALL),
        ("scatter_", OpClass.ROOT_EXCHANGE),
        ("gather_", OpClass.ROOT_EXCHANGE),
        ("send", OpClass.UNBATCHED_P2P),
        ("recv_", OpClass.UNBATCHED_P2P),
        ("something_new_", None),
    ],
)
def test_every_operator_of_torch_has_its_class(operation: str, expected: OpClass | None) -> None:
    assert op_class(operation) is expected


class Memory:
    """A device whose used memory a test sets."""

    def __init__(self) -> None:
        self.used = 0

    def __call__(self) -> int:
        return self.used


def _found(watch: LateWatch) -> list[tuple[Any, ...]]:
    return [(late.op_class, late.operation, late.ranks, late.phase, late.bytes) for late in watch.found]


def _watch(rank: int, address: StoreAddress) -> dict[str, list[tuple[Any, ...]]]:
    dist.init_process_group("gloo", store=connect_store(address, timeout=PATIENCE), rank=rank, world_size=2)
    world = dist.group.WORLD
    memory, one = Memory(), torch.ones(1)
    watch = LateWatch({world.group_name: frozenset({REDUCE})}, probe=memory)
    with watch.watching("train") as found:
        dist.all_reduce(one)
        nothing = [list(found), _found(watch)]
        dist.all_gather([torch.ones(1), torch.ones(1)], one)
        dist.all_gather([torch.ones(1), torch.ones(1)], one)
    first = _found(watch)
    # A class that is connected, and takes memory all the same.
    readings = iter([0, NOTICED_BYTES])
    watch._probe = lambda: next(readings)
    with watch.watching("logprob") as found:
        dist.all_reduce(one)
    dist.destroy_process_group()
    return {
        "nothing": nothing,
        "first": first,
        "second": [(late.op_class, late.phase, late.bytes) for late in found],
    }


def test_a_class_that_was_not_connected_is_told_once_and_one_that_takes_memory_always(address: StoreAddress) -> None:
    for found in values(run_ranks(_watch, 2, address)):
        assert found["nothing"] == [[], []]
        assert found["first"] == [(GATHER, "allgather_", (0, 1), "train", 0)]
        assert found["second"] == [(REDUCE, "logprob", NOTICED_BYTES)]


def _watch_a_slow_device(rank: int, address: StoreAddress) -> list[int]:
    dist.init_process_group("gloo", store=connect_store(address, timeout=PATIENCE), rank=rank, world_size=2)
    one, readings = torch.ones(1), 0

    def slow() -> int:
        nonlocal readings
        readings += 1
        time.sleep(READING_S / 4)
        return 0

    of_bodies, watch = [], LateWatch({}, probe=slow)
    for _ in range(2):
        readings = 0
        with watch.watching("train"):
            for _ in range(20):
                dist.all_reduce(one)
            dist.broadcast(one, src=0)
        of_bodies.append(readings)
    dist.destroy_process_group()
    return of_bodies


def test_the_first_calls_alone_are_looked_at_where_a_reading_takes_long(address: StoreAddress) -> None:
    # Two readings a call, of an operation that is called often and of one that comes late.
    assert values(run_ranks(_watch_a_slow_device, 2, address)) == [[2 * ALWAYS_READ + 2] * 2] * 2


def _step_unprepared(rank: int, address: StoreAddress, config: RunConfig) -> tuple[str, int]:
    """Trains with a bootstrap that has left out the expert-parallel group."""
    worker = Worker(config, rank=rank, size=2)
    run = Bootstrap.run

    def forgetful(self: Bootstrap, **kwargs: Any) -> Any:
        report = run(self, **kwargs)
        ep = dist.distributed_c10d._world.pg_names
        names = [name for group, name in ep.items() if group.group_desc == "EXPERT_MODEL_PARALLEL_GROUP"]
        self.connected = {name: classes for name, classes in self.connected.items() if name not in names}
        return report

    Bootstrap.run = forgetful
    worker.start(address)
    worker.convert()
    try:
        worker.step(reference.random_batch(rows=4))
    except CommunicatorError as error:
        return str(error), len(worker.late_allocations())
    return "", len(worker.late_allocations())


@pytest.mark.parametrize("on_late", ["warn", "raise"])
def test_a_group_that_was_forgotten_is_named_or_refused_after_the_step(on_late: str, address, seeded_models) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    config.rl_safe.bootstrap.on_late = on_late
    for message, found in values(run_ranks(_step_unprepared, 2, address, config)):
        assert found == 1
        assert ("alltoall_base_ (all_to_all) on EXPERT_MODEL_PARALLEL_GROUP [0, 1] in phase train" in message) == (
            on_late == "raise"
        )


def _train(rank: int, address: StoreAddress, overrides: list[str]) -> dict[str, Any]:
    worker = TrainerWorker(load_recipe(RECIPE, overrides), training_rank=rank)
    worker.start(time.time())
    worker.enter_world(address)
    worker.groups()
    connected = {(entry.group, entry.op_class) for entry in worker.bootstrap().entries}
    worker.convert()
    batch = reference.random_batch(rows=4)
    worker.train(replace(batch, old_logprobs=batch.rollout_logprobs), len(batch))
    late = worker.late_allocations()
    worker.teardown()
    return {"connected": connected, "late": late}


def test_the_built_in_trainer_says_how_its_stages_send(address: StoreAddress, seeded_models: dict[str, Path]) -> None:
    overrides = [
        f"model.path={seeded_models['moe']}",
        "cluster.num_trainers=4",
        "megatron.expert_model_parallel_size=2",
        "megatron.pipeline_model_parallel_size=2",
        "actor.ppo_micro_batch_size_per_gpu=2",
    ]
    for found in values(run_ranks(_train, 4, address, overrides)):
        assert found["late"] == []
        # Shapes in batches, activations one by one.
        ways = {op_class for group, op_class in found["connected"] if group == "PIPELINE_MODEL_PARALLEL_GROUP"}
        assert ways == {REDUCE, OpClass.BATCHED_P2P, OpClass.UNBATCHED_P2P}


def test_one_trainer_of_a_model_with_expert_biases_connects_their_group(address: StoreAddress, tmp_path: Path) -> None:
    create_seeded_model(tmp_path / "glm", SeededModelConfig(), family=Family.GLM4_MOE)
    overrides = [f"model.path={tmp_path / 'glm'}", "cluster.num_trainers=1", "megatron.expert_model_parallel_size=1"]
    (found,) = values(run_ranks(_train, 1, address, overrides))
    assert found["late"] == []
    assert ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", REDUCE) in found["connected"]


def test_nobody_looks_if_no_step_is_to_be_watched(address, seeded_models) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    config.rl_safe.bootstrap.watch_steps = 0
    assert values(run_ranks(_step_unprepared, 2, address, config)) == [("", 0)] * 2
