"""Trainers inside a host's default group of five, whose fifth rank never enters a collective."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.checkpoint.audit import audit
from rl_safe_workers.checkpoint.folders.manifest import complete_checkpoints, read_manifest
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.workers import world_entry
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store
from rl_safe_workers.worlds.training_world import TrainingWorld, carve_training_world
from tests.distributed import reference
from tests.distributed.ranks import Outcome, run_ranks, values
from tests.distributed.recording import is_connected
from tests.distributed.worker import Worker, run_config, served_store

JOINT_SIZE, TRAINERS, STEPS = 5, 4, 3
PATIENCE_S = 5.0
"""How long a collective that the fifth rank is missing from may take to fail."""
SLEEP_S = 90.0
WAYS = ("at once", "in the background", "fully parallel")
"""Ways of saving: the first two without a collective, the last by megatron-core on the training world."""
IDENTITY = {"fingerprint": "tiny", "layout": {"world_size": TRAINERS, "expert": 2}}


@dataclass(frozen=True, kw_only=True)
class Host:
    """A framework with one default group for all ranks.

    Attributes:
        sleeper: The joint rank that takes no part; the others are trainers, in order.
        carves: Whether the trainers carve a training world, or go on in the group of five.
        keeps_default: Whether the carved world stays the default group for the save.
        timeout_s: Longest wait of one collective.
    """

    sleeper: int
    carves: bool = True
    keeps_default: bool = True
    ep: int = 2
    timeout_s: float = 60.0

    @property
    def trainers(self) -> list[int]:
        return [rank for rank in range(JOINT_SIZE) if rank != self.sleeper]


def _joint_rank(joint_rank: int, host: Host, address: StoreAddress, model: Path, root: Path) -> Any:
    store = connect_store(address, timeout=timedelta(seconds=SLEEP_S))
    dist.init_process_group(
        "gloo", store=PrefixStore("host", store), rank=joint_rank, world_size=JOINT_SIZE,
        timeout=timedelta(seconds=host.timeout_s),
    )  # fmt: skip
    if joint_rank == host.sleeper:
        result = _sleep(store, host)
    else:
        try:
            result = _train(_worker(joint_rank, host, model), host, address, root)
        finally:
            store.set(f"done/{joint_rank}", "")
    store.set(f"well/{joint_rank}", "")
    return {**result, "sums": _go_on_as_the_host(store)}


def _sleep(store: TCPStore, host: Host) -> dict[str, Any]:
    store.wait([f"done/{rank}" for rank in host.trainers])
    return {"entered_a_collective": is_connected(dist.group.WORLD), "groups": len(c10d._world.pg_map)}


def _go_on_as_the_host(store: TCPStore) -> list[float]:
    """A collective of the host's default group and one of a new group; only once all five are well."""
    try:
        store.wait([f"well/{rank}" for rank in range(JOINT_SIZE)], timedelta(seconds=1))
    except DistStoreError:
        return []
    sums = []
    for group in (dist.group.WORLD, dist.new_group(timeout=timedelta(seconds=10))):
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        sums.append(one.item())
    return sums


def _worker(joint_rank: int, host: Host, model: Path) -> Worker:
    config = run_config(model, ep=host.ep)
    config.rl_safe.timeouts.groups = config.rl_safe.timeouts.save = host.timeout_s
    config.rl_safe.checkpoint.keep_last = 0
    return Worker(config, rank=host.trainers.index(joint_rank), size=TRAINERS)


def _do_not_carve(training_joint_ranks: list[int], *, timeout: timedelta, options: object) -> TrainingWorld:
    return TrainingWorld(
        training_rank=dist.get_rank(), size=TRAINERS, joint_ranks=tuple(training_joint_ranks), host_group=None
    )


def _train(worker: Worker, host: Host, address: StoreAddress, root: Path) -> dict[str, Any]:
    host_group = dist.group.WORLD
    if not host.carves:
        world_entry.carve_training_world = _do_not_carve
    worker.carve_world(address, training_joint_ranks=host.trainers)
    worker.init_groups(seed=0)
    worker.bootstrap()
    worker.convert()
    batch = reference.random_batch(rows=8)
    grad_norms = [worker.step(batch)["grad_norm"] for _ in range(STEPS)]
    if not host.keeps_default:
        c10d._update_default_pg(host_group)
    digests = {way: _save_and_load(worker, root, way, step=STEPS + i) for i, way in enumerate(WAYS)}
    training_rank, default = dist.get_rank(), dist.get_process_group_ranks(dist.group.WORLD)
    return {
        "training_rank": training_rank,
        "default_ranks": default,
        "grad_norms": grad_norms,
        "digests": digests,
        "failed": worker.teardown(),
        "host_group_used": is_connected(host_group),
        "groups_left": [dist.group.WORLD is host_group, dist.get_world_size(), len(c10d._world.pg_map)],
    }


def _save_and_load(worker: Worker, root: Path, way: str, *, step: int) -> tuple[str, str, str]:
    """Digests of what is saved, of what a step makes of it, and of what is loaded."""
    saved = worker.digest()
    worker.safe.rl_safe.checkpoint.fully_parallel_save = way == "fully parallel"
    path = worker.save_checkpoint(root, step=step, driver_state={}, background=way == "in the background", **IDENTITY)
    worker.step(reference.random_batch(rows=8, seed=step))
    moved = worker.digest()
    worker.load_checkpoint(path, **IDENTITY)
    return saved, moved, worker.digest()


def _run(host: Host, model: Path, root: Path) -> list[Outcome]:
    with served_store() as address:
        return run_ranks(_joint_rank, JOINT_SIZE, host, address, model, root, timeout_s=SLEEP_S)


@dataclass(frozen=True)
class Run:
    """A carved run that went well."""

    trainers: list[dict[str, Any]]
    sleeper: dict[str, Any]
    root: Path


@pytest.fixture(scope="module", params=[4, 0], ids=["the_last_rank_sleeps", "joint_rank_0_sleeps"])
def run(request, seeded_models, tmp_path_factory) -> Run:
    host, root = Host(sleeper=request.param), tmp_path_factory.mktemp("carved")
    results = values(_run(host, seeded_models["moe"], root))
    return Run([results[rank] for rank in host.trainers], results[host.sleeper], root)


def test_the_sleeping_rank_enters_no_collective_and_creates_no_group(run: Run) -> None:
    assert not run.sleeper["entered_a_collective"]
    assert run.sleeper["groups"] == 1


def test_no_trainer_uses_the_hosts_group(run: Run) -> None:
    assert [rank["host_group_used"] for rank in run.trainers] == [False] * TRAINERS


def test_the_default_group_is_the_training_world(run: Run) -> None:
    assert [rank["default_ranks"] for rank in run.trainers] == [[0, 1, 2, 3]] * TRAINERS
    assert [rank["training_rank"] for rank in run.trainers] == [0, 1, 2, 3]


def test_every_step_moves_the_weights_alike(run: Run) -> None:
    norms = [rank["grad_norms"] for rank in run.trainers]
    assert norms == [norms[0]] * TRAINERS
    assert len(set(norms[0])) == STEPS
    assert min(norms[0]) > 0


def test_every_checkpoint_is_complete(run: Run) -> None:
    found = complete_checkpoints(run.root)
    assert sorted(path.name for path, _ in found) == [f"global_step_{STEPS + i}" for i in range(len(WAYS))]
    for path, manifest in found:
        assert manifest == read_manifest(path)
        assert {"dist_ckpt/metadata.json", "dist_ckpt/.metadata"} <= manifest.files.keys()
        assert audit(path, deep=True).problems == ()


def test_every_trainer_writes_a_file_unless_megatron_shares_out(run: Run) -> None:
    for step in (STEPS, STEPS + 1):
        files = read_manifest(run.root / f"global_step_{step}").files
        assert {f"dist_ckpt/__{rank}_0.distcp" for rank in range(TRAINERS)} <= files.keys()


@pytest.mark.parametrize("way", WAYS)
def test_a_load_brings_back_every_bit_of_what_was_saved(way: str, run: Run) -> None:
    for rank in run.trainers:
        saved, moved, loaded = rank["digests"][way]
        assert loaded == saved != moved


def test_teardown_leaves_the_host_its_default_group_and_no_other(run: Run) -> None:
    assert [rank["failed"] for rank in run.trainers] == [{}] * TRAINERS
    assert [rank["groups_left"] for rank in run.trainers] == [[True, JOINT_SIZE, 1]] * TRAINERS


def test_the_host_can_go_on_with_all_five_ranks(run: Run) -> None:
    assert [rank["sums"] for rank in [*run.trainers, run.sleeper]] == [[JOINT_SIZE, JOINT_SIZE]] * JOINT_SIZE


LEFT_OUT = {
    # Megatron counts the fifth rank as one of its own.
    "carving_with_experts": (Host(sleeper=4, carves=False, timeout_s=PATIENCE_S), "world_size (5) is not divisible"),
    # Five ranks factor, so that its groups wait for the fifth.
    "carving": (Host(sleeper=4, carves=False, ep=1, timeout_s=PATIENCE_S), "wait timeout after 5000ms, keys: "),
    # Groups and steps of the trainers' own, but the host's default group at the save (NeMo RL 2225).
    "default_group_for_the_save": (Host(sleeper=0, keeps_default=False, timeout_s=PATIENCE_S), "in the default group"),
}


@pytest.mark.parametrize(("host", "reason"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_without_carving_every_trainer_fails(host: Host, reason: str, seeded_models, tmp_path) -> None:
    outcomes = _run(host, seeded_models["moe"], tmp_path)
    for rank in host.trainers:
        assert outcomes[rank].error is not None, f"rank {rank} got through"
        assert reason in outcomes[rank].trace
    assert complete_checkpoints(tmp_path) == []


def _refusals(rank: int, address: StoreAddress) -> dict[str, str]:
    store, second = connect_store(address, timeout=timedelta(seconds=30)), timedelta(seconds=1)
    messages = {}

    def refuse(name: str, ranks: list[int]) -> None:
        try:
            carve_training_world(ranks, timeout=second)
        except CommunicatorError as error:
            messages[name] = str(error)

    refuse("no default group", [0])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    refuse("not a member", [1 - rank])
    refuse("repeated ranks", [0, 0, 1])
    refuse("a rank that does not exist", [0, 1, 2])
    refuse("out of order", [1, 0])
    dist.group.WORLD.bound_device_id = torch.device("cuda", rank)
    refuse("bound to a device", [rank])
    return messages


@pytest.fixture(scope="module")
def refusals() -> dict[str, str]:
    with served_store() as address:
        return values(run_ranks(_refusals, 2, address))[1]


REFUSALS = {
    "no default group": "there is no default group to carve",
    "not a member": "rank 1 is not a training rank ([0])",
    "repeated ranks": "[0, 0, 1] must be distinct, ascending",
    "a rank that does not exist": "[0, 1, 2] must be distinct, ascending ranks of a group of 2",
    "out of order": "[1, 0] must be distinct, ascending",
    "bound to a device": "the default group is bound to cuda:1",
}


@pytest.mark.parametrize(("case", "message"), REFUSALS.items(), ids=REFUSALS)
def test_carving_is_refused(case: str, message: str, refusals: dict[str, str]) -> None:
    assert message in refusals[case]


def _wrong_rank(rank: int, address: StoreAddress, model: Path) -> None:
    store = connect_store(address, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=PrefixStore("host", store), rank=rank, world_size=2)
    Worker(run_config(model), rank=1 - rank, size=2).carve_world(address, training_joint_ranks=[0, 1])


def test_a_worker_that_takes_itself_for_another_rank_is_refused(address, seeded_models) -> None:
    errors = [outcome.error for outcome in run_ranks(_wrong_rank, 2, address, seeded_models["moe"])]
    assert [type(error) for error in errors] == [CommunicatorError] * 2
    assert "is training rank 0 of 2 in [0, 1], but was set up as training rank 1 of 2" in str(errors[0])
