"""Proves the weight syncs of ms-swift's driver in Ray mode, if the settings say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ray

from rl_safe_workers.adapters.swift.ray_waits import RayWaits
from rl_safe_workers.adapters.sync_prover import SyncProver

TRANSFERS = ("_sync_weights_naive", "_sync_weights_nccl")
"""ms-swift's two methods that send weights. The engines are awake before, and stay awake."""


def prove_syncs(waits: RayWaits, *, every: int) -> None:
    """Makes the job's engines read weights back, and its driver compare them. Call it before any engine exists.

    Args:
        waits: The driver's waits.
        every: The setting ``prove_sync_freq``.
    """
    from swift.ray.megatron.checkpoint_engine.manager import CheckpointEngineManager
    from swift.ray.megatron.grpo_trainer import GRPOTrainer
    from swift.ray.megatron.rollout import vllm_server

    from rl_safe_workers.adapters.swift.proved_server import ProvedServer

    vllm_server.VllmServer = ProvedServer
    prove_transfers(CheckpointEngineManager, waits, every=every)
    log_proofs(GRPOTrainer)


def prove_transfers(manager: Any, waits: RayWaits, *, every: int) -> None:
    """Makes ms-swift's ``CheckpointEngineManager`` compare weights after it has sent them. Call it before it is made.

    Args:
        manager: The class ``CheckpointEngineManager``.
        waits: The driver's waits.
        every: The setting ``prove_sync_freq``.
    """
    manager.__init__ = _with_prover(manager.__init__, waits, every)
    for name in TRANSFERS:
        setattr(manager, name, _proving(getattr(manager, name), waits))


def log_proofs(trainer: Any) -> None:
    """Makes ms-swift log the metrics of a proved sync with those of the next step.

    Args:
        trainer: The class ``GRPOTrainer`` of the driver.
    """
    original = trainer._build_grpo_log_metrics

    @functools.wraps(original)
    def build_grpo_log_metrics(self: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {**original(self, *args, **kwargs), **self.ckpt_manager.rl_safe_prover.take_metrics()}

    trainer._build_grpo_log_metrics = build_grpo_log_metrics


def _with_prover(original: Callable[..., None], waits: RayWaits, every: int) -> Callable[..., None]:
    @functools.wraps(original)
    def init(manager: Any, *args: Any, **kwargs: Any) -> None:
        original(manager, *args, **kwargs)
        first = manager.train_actors[0]  # every rank sends the same weights
        manager.rl_safe_prover = SyncProver(
            waits.driver,
            every=every,
            announce=lambda: ray.get(first.rl_safe_prove.remote()),
            sent=lambda: [ray.get(first.rl_safe_sent.remote())],
            engines=lambda: manager.rollout_actors,
        )
        manager.rl_safe_syncs = 0

    return init


def _proving(original: Callable[[Any, bool], None], waits: RayWaits) -> Callable[[Any, bool], None]:
    @functools.wraps(original)
    def sync_weights(manager: Any, merge_and_sync: bool) -> None:
        manager.rl_safe_syncs += 1
        with waits.judged():
            manager.rl_safe_prover.sync(
                lambda: original(manager, merge_and_sync),
                what=f"weight sync {manager.rl_safe_syncs}",
                before_redoing=lambda: None,
            )

    return sync_weights
