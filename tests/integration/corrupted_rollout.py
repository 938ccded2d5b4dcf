"""The rollout rank of `tests.integration.corrupted_command`, in a module of its own: the command imports no vLLM."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rl_safe_workers.rollout import vllm_transfer
from rl_safe_workers.rollout.vllm import VllmRollout
from rl_safe_workers.rollout.vllm_transfer import JointUpdateInfo, JointWeightTransferEngine
from tests.unpacking import unpack

CORRUPTED = "model.layers.1.mlp.experts.3.down_proj.weight"


class CorruptedRollout(VllmRollout):
    """A rollout rank at the end of a wire that flips a bit."""

    def corrupt(self, syncs: int) -> None:
        """Prepares this process. Comes before everything else."""

        class CorruptedEngine(JointWeightTransferEngine):
            left = syncs

            def receive_weights(self, update_info: JointUpdateInfo) -> None:
                super().receive_weights(update_info)
                self.left -= 1

            def _load(self, number: int, buffer: torch.Tensor, wait: Callable[[], None]) -> None:
                wait()
                bucket, _ = self._buckets[number]
                for name, tensor in unpack(bucket, buffer):
                    if name == CORRUPTED and self.left > 0:
                        tensor.view(torch.int32)[5, 7] ^= 1
                super()._load(number, buffer, lambda: None)

        vllm_transfer.JointWeightTransferEngine = CorruptedEngine  # type: ignore[misc]
