"""NeMo RL's extension of vLLM's worker, made to read its weights back after a refit. Importing this imports vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension

from rl_safe_workers.rollout.packing import dtype_name
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.proved_worker import ProvedWorker


class ProvedVllmExtension(ProvedWorker, VllmInternalWorkerExtension):
    """NeMo RL's extension, made to read weights back. It reads all announced weights, even if some were not sent."""

    state_dict_info: dict[str, tuple[Any, torch.dtype]]

    def update_weights_via_ipc_zmq(self) -> bool:
        """Receives weights from the trainer on the same GPU. Reads them back if they are to be proved."""
        return self._rl_safe_received(super().update_weights_via_ipc_zmq)

    def update_weights_from_collective(self) -> bool:
        """Receives weights over the communicator with the trainers. Reads them back if they are to be proved."""
        return self._rl_safe_received(super().update_weights_from_collective)

    def _rl_safe_received(self, receive: Callable[[], bool]) -> bool:
        with self._rl_safe_proving():
            self._rl_safe_watch(
                [
                    WeightSpec(name=name, dtype=dtype_name(dtype), shape=tuple(shape))
                    for name, (shape, dtype) in self.state_dict_info.items()
                ]
            )
            return receive()
