"""NeMo RL's extension of vLLM's worker, made to read weights back and to join our joint group. Imports vLLM."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension

from rl_safe_workers.rollout.packing import dtype_name
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.proved_worker import ProvedWorker
from rl_safe_workers.rollout.read_back import engine_rank, obstacle
from rl_safe_workers.rollout.vllm_transfer import (
    JointInitInfo,
    JointUpdateInfo,
    JointWeightTransferEngine,
    make_transfer_engine,
)


class SafeVllmExtension(ProvedWorker, VllmInternalWorkerExtension):
    """NeMo RL's extension, made to receive weights over our joint group, and to read weights back.

    It reads all announced weights, even if some were not sent.
    """

    state_dict_info: dict[str, tuple[Any, torch.dtype]]
    device: torch.device
    _rl_safe_transfer: JointWeightTransferEngine | None = None
    """Receives weights over our joint group; None if NeMo RL's own way is used."""

    def rl_safe_engine(self) -> dict[str, Any]:
        """Returns arguments of `cuts.engine_ranks` for this engine, and ``obstacle``: why it cannot join, or None."""
        config = self.model_runner.vllm_config
        rank = engine_rank(config, self.rank)
        sizes = {"size": rank.size, "kv_heads": rank.kv_heads, "expert_parallel": rank.expert_parallel}
        # NeMo RL loads a draft model's weights beside the model's, and converts them in its own way.
        drafts = None if config.speculative_config is None else "it has a draft model"
        return {**sizes, "obstacle": obstacle(config) or drafts}

    def rl_safe_join(self, first_rank: int, info: dict[str, Any]) -> None:
        """Joins our joint group. Collective over: trainers and rollout ranks.

        Args:
            first_rank: Rollout rank of the engine's first worker.
            info: Fields of `JointInitInfo`, without ``rollout_rank``.

        Raises:
            PhaseTimeoutError: If a rank does not come in time; names it.
            WeightSyncError: If the group cannot be connected.
        """
        runner = self.model_runner
        rank = engine_rank(runner.vllm_config, self.rank).rank
        transfer = make_transfer_engine(
            runner.vllm_config,
            runner.model,
            device=self.device,
            load=lambda weights: self._load_weights(list(weights)),
        )
        torch.cuda.empty_cache()  # NCCL takes its memory beside torch's
        transfer.init_transfer_engine(JointInitInfo(rollout_rank=first_rank + rank, **info))
        self._rl_safe_transfer = transfer

    def rl_safe_leave(self) -> None:
        """Leaves our joint group, if this worker has joined it. With NCCL, this waits until the trainers leave, too."""
        if self._rl_safe_transfer is not None:
            self._rl_safe_transfer.shutdown()

    def update_weights_via_ipc_zmq(self) -> bool:
        """Receives weights from the trainer on the same GPU. Reads them back if they are to be proved."""
        return self._rl_safe_received(super().update_weights_via_ipc_zmq)

    def update_weights_from_collective(self) -> bool:
        """Receives weights over the communicator with the trainers, or over our joint group.

        Reads them back if they are to be proved.
        """
        if self._rl_safe_transfer is None:
            return self._rl_safe_received(super().update_weights_from_collective)
        is_due, self._rl_safe_is_due = self._rl_safe_is_due, False
        transfer = self._rl_safe_transfer
        transfer.receive_weights(JointUpdateInfo(prove=is_due))
        goes_through_loaders = transfer.obstacle is not None
        transfer.finish_weight_update()
        self._rl_safe_last = transfer.held
        if goes_through_loaders:  # loaders leave memory behind, and NeMo RL frees it in the same way
            gc.collect()
            torch.cuda.empty_cache()
        return True

    def _rl_safe_received(self, receive: Callable[[], bool]) -> bool:
        with self._rl_safe_proving():
            self._rl_safe_watch(
                [
                    WeightSpec(name=name, dtype=dtype_name(dtype), shape=tuple(shape))
                    for name, (shape, dtype) in self.state_dict_info.items()
                ]
            )
            return receive()
