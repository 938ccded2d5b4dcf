"""Trainers inside a host's default group of five, whose fifth rank never enters a collective."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from rl_safe_workers.checkpoint.audit import audit
from rl_safe_workers.checkpoint.folders.manifest import complete_checkpoints, read_manifest
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store
from rl_safe_workers.worlds.training_world import carve_training_world
from tests.distributed.carved_ranks import JOINT_SIZE, PATIENCE_S, STEPS, TRAINERS, WAYS, Host, Run, run_host
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config, served_store


@pytest.fixture(scope="module", params=[4, 0], ids=["the_last_rank_sleeps", "joint_rank_0_sleeps"])
def run(request, seeded_models, tmp_path_factory) -> Run:
    host, root = Host(sleeper=request.param), tmp_path_factory.mktemp("carved")
    results = values(run_host(host, seeded_models["moe"], root))
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
    outcomes = run_host(host, seeded_models["moe"], tmp_path)
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
