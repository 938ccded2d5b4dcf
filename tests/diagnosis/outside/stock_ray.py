"""A job on Ray without this package: two trainers, two rollout engines, and a place for a fault in each call."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray
import torch
import torch.distributed as dist

from tests.diagnosis.misdeeds import here

TRAINERS = ENGINES = 2
STEPS = 2


@ray.remote(num_cpus=0)
class Engine:
    """A rollout engine without a model."""

    def __init__(self, rank: int, folder: str) -> None:
        """Notes its process."""
        self.rank = rank
        (Path(folder) / f"pid_rollout_{rank}").write_text(str(os.getpid()))

    def wake_kv_cache(self) -> None:
        """Takes weights."""
        here("rollout", self.rank, "sync", "wake_kv_cache")

    def generate(self) -> int:
        """Generates."""
        here("rollout", self.rank, "rollout", "generate")
        return self.rank


@ray.remote(num_cpus=0)
class Trainer:
    """A training rank without a model."""

    def __init__(self, rank: int, folder: str, engines: list[ray.actor.ActorHandle]) -> None:
        """Notes its process."""
        self.rank, self.folder, self.engine = rank, Path(folder), engines[rank]
        (self.folder / f"pid_trainer_{rank}").write_text(str(os.getpid()))

    def start(self) -> None:
        """Creates the group."""
        meeting = f"file://{self.folder}/meet"
        dist.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=TRAINERS)

    def run(self, phase: str) -> None:
        """Goes through a phase with the other trainer."""
        dist.all_reduce(torch.ones(1))
        here("trainer", self.rank, phase)
        if phase == "sync":
            ray.get(self.engine.wake_kv_cache.remote())
        dist.all_reduce(torch.ones(1))

    def teardown(self) -> None:
        """Ends the group."""
        here("trainer", self.rank, "teardown")
        dist.destroy_process_group()


def main(folder: Path) -> None:
    ray.init(num_cpus=4, include_dashboard=False, _temp_dir=str(folder / "r"))
    (folder / "address").write_text(ray.get_runtime_context().gcs_address)
    engines = [Engine.remote(rank, str(folder)) for rank in range(ENGINES)]
    trainers = [Trainer.remote(rank, str(folder), engines) for rank in range(TRAINERS)]
    ray.get([one.start.remote() for one in trainers])
    for phase in ("load", *("sync", "rollout", "logprob", "train") * STEPS, "save"):
        if phase == "rollout":
            ray.get([one.generate.remote() for one in engines])
        else:
            ray.get([one.run.remote(phase) for one in trainers])
    ray.get([one.teardown.remote() for one in trainers])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
