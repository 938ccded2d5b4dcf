"""A training rank as the tests drive it: the real mixins over the real policy, without Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from megatron.core import parallel_state

from rl_safe_workers.checkpoint.state.state import state_digest
from rl_safe_workers.config import (
    ActorConfig,
    DataConfig,
    MegatronConfig,
    ModelConfig,
    OptimConfig,
    RlSafeConfig,
    RunConfig,
    TimeoutsConfig,
)
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.platforms import cpu
from rl_safe_workers.ranks import TRAINING_WORLD, joint_ids
from rl_safe_workers.trainer.batch import SequenceBatch
from rl_safe_workers.trainer.policy import MegatronPolicy
from rl_safe_workers.workers.actor import MegatronActorMixin
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store, serve_store


def run_config(
    model: Path, *, tp: int = 1, pp: int = 1, ep: int = 1, vpp: int | None = None, **actor: object
) -> RunConfig:
    """A configuration with short timeouts and an optimizer that is easy to compare.

    At a tiny eps the first Adam step is nearly the sign of the gradient, which hides differences and magnifies noise.
    """
    timeouts = dict.fromkeys(TimeoutsConfig.model_fields, 60.0)
    return RunConfig(
        model=ModelConfig(path=str(model)),
        data=DataConfig(train_files=[]),
        actor=ActorConfig(optim=OptimConfig(lr=1e-3, eps=1e-3), **actor),  # type: ignore[arg-type]
        megatron=MegatronConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            expert_model_parallel_size=ep,
        ),
        rl_safe=RlSafeConfig(timeouts=TimeoutsConfig(**timeouts)),
    )


class Worker(MegatronActorMixin, MegatronPolicy):
    """One training rank."""

    def __init__(self, config: RunConfig, *, rank: int, size: int) -> None:
        cpu.apply()
        self.config, self.device = config, torch.device("cpu")
        self.setup_worker(
            training_rank=rank,
            training_size=size,
            rl_safe=config.rl_safe,
            megatron=config.megatron,
            device=self.device,
        )

    def start(self, address: StoreAddress) -> None:
        """Joins the world at a store, and creates and connects Megatron's groups."""
        self.init_world(address, backend="gloo")
        self.init_groups(seed=0)
        self.bootstrap()

    def convert(self) -> None:
        """Builds the model, as a phase."""
        with self.phase(Phase.CONVERT):
            self.build()

    def shard(self, batch: SequenceBatch) -> SequenceBatch:
        """The rows of this rank's data-parallel rank."""
        size = parallel_state.get_data_parallel_world_size()
        rank, per_rank = parallel_state.get_data_parallel_rank(), len(batch) // size
        return batch.select(slice(rank * per_rank, (rank + 1) * per_rank))

    def step(self, batch: SequenceBatch) -> dict[str, float]:
        """One optimizer step on the whole batch, from old log-probabilities of 0. Collective."""
        shard = self.shard(batch)
        with self.phase(Phase.TRAIN):
            (metrics,) = self.update_policy(shard.with_logprobs(old=shard.rollout_logprobs), mini_batch_size=len(shard))
        return metrics

    def digest(self) -> str:
        """Digest of every bit of parameters, optimizer state and random state."""
        return state_digest(self.chunks, self.optimizer)


def control_plane(
    address: StoreAddress,
    *,
    rank: int,
    size: int,
    trainers: int | None = None,
    world: str = TRAINING_WORLD,
    patience_s: float = 30.0,
) -> ControlPlane:
    """A rank's place in a world of trainers, or also of rollout ranks, over a connection of its own."""
    members = joint_ids(trainers=size if trainers is None else trainers, size=size)
    store = connect_store(address, timeout=timedelta(seconds=patience_s))
    return ControlPlane(store, world=world, rank=rank, members=members, secret=address.secret)


@contextmanager
def served_store() -> Iterator[StoreAddress]:
    """A store in this process, which outlives every rank."""
    store, address, _ = serve_store("127.0.0.1", timeout=timedelta(seconds=60))
    yield address
    del store


def exchange_address(worker: Worker, file: Path) -> StoreAddress:
    """Rank 0 serves the store and writes its address; the others wait for the file."""
    if worker.safe.training_rank == 0:
        address = worker.serve_store("127.0.0.1")
        temporary = file.with_suffix(".tmp")
        temporary.write_text(f"{address.port} {address.secret.hex()}")
        temporary.rename(file)
        return address
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, "rank 0 did not write the store's address"
        time.sleep(0.01)
    port, secret = file.read_text().split()
    return StoreAddress(host="127.0.0.1", port=int(port), secret=bytes.fromhex(secret))
