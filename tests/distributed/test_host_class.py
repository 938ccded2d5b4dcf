"""The mixin over a host class of one's own, as the README shows it: no driver, no phases of the built-in trainer."""

from __future__ import annotations

from pathlib import Path

import torch

from rl_safe_workers import MegatronActorMixin
from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import LifecycleError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.platforms import cpu
from rl_safe_workers.trainer.policy import MegatronPolicy
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import run_config

SIZE = 4


class Host(MegatronPolicy):
    """A Megatron actor that knows nothing of us; it builds its model as it likes."""

    def __init__(self, config: RunConfig) -> None:
        cpu.apply()
        self.config, self.device = config, torch.device("cpu")


class Actor(MegatronActorMixin, Host):
    """What the README's reader writes."""

    def set_up(self, rank: int, address: StoreAddress) -> None:
        self.setup_worker(
            training_rank=rank,
            training_size=SIZE,
            rl_safe=self.config.rl_safe,
            megatron=self.config.megatron,
            device=self.device,
        )
        self.init_world(address, backend="gloo")
        self.init_groups(seed=0)
        self.bootstrap()
        self.build()


def _life(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> list[str]:
    actor = Actor(config)
    refusals = []
    try:
        actor.offload()
    except LifecycleError as error:
        refusals.append(str(error))
    actor.set_up(rank, address)
    actor.offload()
    try:
        actor.save_checkpoint(root, step=1, fingerprint="f", layout={}, driver_state={})
    except LifecycleError as error:
        refusals.append(str(error))
    actor.onload()
    path = actor.save_checkpoint(root, step=1, fingerprint="f", layout={}, driver_state={})
    actor.load_checkpoint(path, fingerprint="f", layout={})
    assert actor.teardown() == {}
    assert actor.lifecycle.has_completed(Phase.TEARDOWN)
    return refusals


def test_a_host_that_builds_its_own_model_lives_from_set_up_to_teardown(address, seeded_models, tmp_path) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    for first, second in values(run_ranks(_life, SIZE, address, config, tmp_path)):
        assert "call setup_worker() before anything else" in first
        assert "its state is in host memory; call onload() first" in second
