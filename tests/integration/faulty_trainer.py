"""A trainer that fails on training rank 1 in its second update."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from rl_safe_workers.trainer.batch import SequenceBatch
from rl_safe_workers.trainer.worker import TrainerWorker

FAULTY_RANK, FAULTY_UPDATE = 1, 2


class FaultyTrainer(TrainerWorker):
    """Raises or dies inside the phase, where the others wait for it in a collective, or never enters it."""

    updates = 0

    def train(self, batch: SequenceBatch, mini_batch_size: int) -> list[dict[str, float]]:
        self.updates += 1
        if self._is_to("stall"):
            time.sleep(3600)
        return super().train(batch, mini_batch_size)

    def update_policy(self, batch: SequenceBatch, **kwargs: Any) -> list[dict[str, float]]:
        if self._is_to("raise"):
            raise ValueError("no luck\non this rank")
        if self._is_to("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update_policy(batch, **kwargs)

    def _is_to(self, fault: str) -> bool:
        return (os.environ["RL_SAFE_TEST_FAULT"], self.training_rank, self.updates) == (
            fault,
            FAULTY_RANK,
            FAULTY_UPDATE,
        )
