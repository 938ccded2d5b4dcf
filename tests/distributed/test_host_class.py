"""The mixin over a host class of one's own, as the README shows it: no driver, no phases of the built-in trainer."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch

from rl_safe_workers import MegatronActorMixin
from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import LifecycleError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.platforms import cpu
from rl_safe_workers.rollout.protocol import plan_buckets
from rl_safe_workers.trainer.policy import MegatronPolicy
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.joint_group import JointGroup, joint_world
from rl_safe_workers.worlds.store import connect_store
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import control_plane, run_config
from tests.unpacking import unpack

SIZE, BUCKET_BYTES = 4, 200_000
PATIENCE = timedelta(seconds=60)


class Host(MegatronPolicy):
    """A Megatron actor that knows nothing of us; it builds its model as it likes."""

    def __init__(self, config: RunConfig) -> None:
        cpu.apply()
        self.config, self.device = config, torch.device("cpu")


class BareHost:
    """A Megatron actor that has what MegatronHost asks for, and no more."""

    def __init__(self, config: RunConfig) -> None:
        self._policy = Host(config)
        self.config, self.device = config, self._policy.device

    def build(self) -> None:
        self._policy.build()
        self.chunks, self.optimizer = self._policy.chunks, self._policy.optimizer

    def export_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._policy.export_hf_weights()


class SetUp(MegatronActorMixin):
    """The class that the README's reader writes, over a host that is yet to be named."""

    config: RunConfig

    def set_up(self, rank: int) -> None:
        self.setup_worker(
            training_rank=rank,
            training_size=SIZE,
            rl_safe=self.config.rl_safe,
            megatron=self.config.megatron,
            device=self.device,
        )

    def connect(self, address: StoreAddress) -> None:
        self.init_world(address, backend="gloo")
        self.init_groups(seed=0)
        self.bootstrap()
        self.build()


class Actor(SetUp, Host):
    """Over a host that can tell which weights each rank has."""


class BareActor(SetUp, BareHost):
    """Over one that cannot."""


def _life(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> list[str]:
    actor = Actor(config)
    refusals = []
    try:
        actor.offload()
    except LifecycleError as error:
        refusals.append(str(error))
    actor.set_up(rank)
    actor.connect(address)
    actor.offload()
    try:
        actor.save_checkpoint(root, step=1, fingerprint="f", layout={}, driver_state={})
    except LifecycleError as error:
        refusals.append(str(error))
    actor.onload()
    path = actor.save_checkpoint(root, step=1, fingerprint="f", layout={}, driver_state={})
    actor.load_checkpoint(path, fingerprint="f", layout={})
    assert actor.teardown() == {}
    assert actor.safe.lifecycle.has_completed(Phase.TEARDOWN)
    return refusals


def test_a_host_that_builds_its_own_model_lives_from_set_up_to_teardown(address, seeded_models, tmp_path) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    for first, second in values(run_ranks(_life, SIZE, address, config, tmp_path)):
        assert "call setup_worker() before anything else" in first
        assert "its state is in host memory; call onload() first" in second


Weights = dict[str, bytes]


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _sync(rank: int, address: StoreAddress, config: RunConfig) -> Weights:
    """Trainers send to one rollout rank; returns what they export, and what it receives."""
    if rank == SIZE:
        return _receive(address)
    actor = BareActor(config)
    assert not hasattr(actor, "own_hf_weights")
    actor.set_up(rank)
    actor.connect(address)
    actor.safe.store.set(f"specs/{rank}", pickle.dumps(actor.weight_specs()))
    actor.join(SIZE + 1)
    actor.send_weights(bucket_bytes=BUCKET_BYTES)
    weights = {name: _bits(weight) for name, weight in actor.export_hf_weights()}
    assert actor.teardown() == {}
    return weights


def _receive(address: StoreAddress) -> Weights:
    store = connect_store(address, timeout=PATIENCE)
    control = control_plane(address, rank=SIZE, size=SIZE + 1, trainers=SIZE, world=joint_world(0))
    group = JointGroup(control, generation=0, timeout=PATIENCE, device=torch.device("cpu"))
    received = {}
    for bucket in plan_buckets(pickle.loads(store.get("specs/0")), bucket_bytes=BUCKET_BYTES):
        buffer = torch.empty(bucket.size_bytes, dtype=torch.uint8)
        group.broadcast(buffer, source=bucket.source)()
        received.update({name: _bits(weight) for name, weight in unpack(bucket, buffer)})
    return received


def test_a_host_that_can_only_export_sends_every_weight_bit_for_bit(address, seeded_models) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    *exported, received = values(run_ranks(_sync, SIZE + 1, address, config, timeout_s=30))
    assert received
    assert exported == [received] * SIZE
