"""The trainer of `tests.chaos.counting_command`, in a module of its own: the command imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil

from rl_safe_workers.compat.torch_groups import group_count, registered_groups
from rl_safe_workers.trainer.batch import SequenceBatch
from rl_safe_workers.trainer.trainer_worker import TrainerWorker


class CountingTrainer(TrainerWorker):
    """A training rank; rank 0 tells after each update what it holds."""

    counts_to: str

    def train(self, batch: SequenceBatch, mini_batch_size: int) -> list[dict[str, float]]:
        metrics = super().train(batch, mini_batch_size)
        if self._rank == 0:
            store: Any = self.safe.store
            process = psutil.Process()
            counts = {
                "keys": len(store.list_keys()),
                "groups": group_count() + len(registered_groups()),
                "files": process.num_fds(),
                "threads": process.num_threads(),
                "MiB": process.memory_info().rss >> 20,
            }
            with Path(self.counts_to).open("a") as file:
                file.write(json.dumps(counts) + "\n")
        return metrics
