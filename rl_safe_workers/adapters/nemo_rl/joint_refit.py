"""Sends the weights of NeMo RL's refits over our joint group: the trainers' side.

NeMo RL brings every weight to every trainer, and rank 0 sends them to vLLM's loaders. Here each weight goes from a rank
that has it. The driver calls `JointRefit.plan` and `JointRefit.join` once NeMo RL has prepared its refits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch

from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NemoRlSettings
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.models.conversion_tasks import own_weights_of_tasks
from rl_safe_workers.models.own_weights import Announced, OwnWeight
from rl_safe_workers.rollout.cuts import engine_ranks
from rl_safe_workers.rollout.sync_proof import SentWeights
from rl_safe_workers.workers.safe_trainer import SafeTrainer
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.door import Door
from rl_safe_workers.worlds.joint_group import joint_control
from rl_safe_workers.worlds.store import serve_store

logger = logging.getLogger(__name__)

Plan = Mapping[str, Any]
"""Fields of `vllm_transfer.JointInitInfo`, without those that only the driver or a vLLM worker knows."""


class _RefitHost:
    """A worker of NeMo RL's as a weight sync needs it; see `training_rank.MegatronHost`."""

    optimizer = None

    def __init__(self, worker: Any, announced: Announced) -> None:
        self._worker, self._announced = worker, announced

    @property
    def chunks(self) -> list[Any]:
        """The model. NeMo RL supports no virtual pipeline stages."""
        return [self._worker.model]

    def export_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every HF weight on every rank, as NeMo RL sends them. Collective over: the training world."""
        yield from self._worker._iter_params_with_optional_kv_scales()

    @torch.no_grad()
    def own_hf_weights(self) -> list[OwnWeight] | None:
        """Returns the weights that this rank builds; None if `export_hf_weights` is needed.

        Collective over: the training world.
        """
        worker = self._worker
        found = own_weights_of_tasks(
            worker.megatron_bridge, self.chunks, worker.refit_conversion_tasks, self._announced
        )
        if isinstance(found, str):
            if worker.rank == 0:
                logger.warning("a refit gathers every weight on every training rank: %s", found)
            return None
        return found


class JointRefit:
    """Sends a worker's weights over the joint group. After a failure, later refits fail, too."""

    def __init__(self, trainer: SafeTrainer, settings: NemoRlSettings) -> None:
        """Stores its arguments."""
        self._trainer, self._settings = trainer, settings
        self._store: Any = None
        self._door: Door | None = None
        """On training rank 0, the server of the joint world's store, and the door of its port."""
        self._proves = False

    def plan(self, worker: Any, announced: Announced) -> Plan | None:
        """Finds out which rank sends which weight. Collective over: the training world.

        Args:
            worker: NeMo RL's worker, which has prepared its refits.
            announced: The result of NeMo RL's ``prepare_refit_info``.

        Returns:
            The plan on training rank 0; None on other ranks.
        """
        trainer, timeouts = self._trainer, self._settings.timeouts
        trainer.comms.require("weight sync")
        trainer.host = _RefitHost(worker, announced)
        with trainer.phase(Phase.SYNC):
            specs = trainer.weights.weight_specs()
            if trainer.training_rank > 0:
                return None
            # NeMo RL's default group has been made at this address, so all nodes reach it.
            self._store, address, self._door = serve_store(
                os.environ["MASTER_ADDR"], timeout=trainer.timeout(Phase.JOINT)
            )
        return {
            **asdict(address),
            "secret": address.secret.hex(),
            "trainers": trainer.training_size,
            "generation": 0,
            "join_timeout_s": timeouts.joint,
            "sync_timeout_s": timeouts.sync,
            "colocated": False,
            "specs": [asdict(spec) for spec in specs],
            "bucket_bytes": self._bucket_bytes,
        }

    @property
    def _bucket_bytes(self) -> int:
        return self._settings.refit_bucket_megabytes * 2**20

    def join(self, address: StoreAddress, *, rollout_ranks: Sequence[int], engine: Mapping[str, Any]) -> None:
        """Joins the joint group. Collective over: trainers and rollout ranks.

        Args:
            address: Address of the joint world's store.
            rollout_ranks: Rollout ranks in the group, ascending.
            engine: Arguments of `cuts.engine_ranks`, the same for each engine.

        Raises:
            PhaseTimeoutError: If some rank does not arrive in time; names it.
            WeightSyncError: If the group cannot be connected.
        """
        trainer = self._trainer
        size = trainer.training_size + len(rollout_ranks)
        torch.cuda.empty_cache()  # NCCL takes its memory beside torch's
        control = joint_control(
            address,
            generation=0,
            joint_rank=trainer.training_rank,
            trainers=trainer.training_size,
            rollout_ranks=rollout_ranks,
            timeout=trainer.timeout(Phase.JOINT),
        )
        with nullcontext() if self._door is None else self._door.opened():
            trainer.weights.join(size, engine=engine_ranks(**engine), control=control)

    def send(self) -> None:
        """Sends all weights. Collective over: the joint group.

        Raises:
            WeightSyncError: On every trainer, if it failed on any.
            PhaseTimeoutError: If a trainer does not come in time; names it.
        """
        prove, self._proves = self._proves, False
        self._trainer.weights.send_weights(bucket_bytes=self._bucket_bytes, prove=prove)

    def prove(self) -> None:
        """Makes the next refit take digests of the weights that this rank sends."""
        self._proves = True

    @property
    def sent(self) -> SentWeights:
        """Digests of the weights that this rank sent last."""
        return self._trainer.weights.sent
