"""Rollout routing replay: the trainer sends each token to the experts that the rollout has chosen.

If two experts are nearly tied, two bf16 implementations may pick different ones, and the token's log-probability is off
by some 0.05 nat. The replay fixes only the choice. The routing weights of the chosen experts are still the trainer's
own, and have gradients. The method is from "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers" (arXiv 2510.11370). Megatron's RouterReplay holds the choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from rl_safe_workers.errors import ConfigError
from rl_safe_workers.trainer.batch import Experts


def forget_routers() -> None:
    """Drops the routers of earlier models, which Megatron would keep alive in its own list."""
    RouterReplay.clear_global_router_replay_instances()


class Routing:
    """The routers of this rank's model chunks, which must be built with ``moe_enable_routing_replay``."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: Any) -> None:
        """Finds the routers of the chunks.

        Args:
            chunks: The model chunks, as the pipeline schedule passes them to its forward steps.
            config: Megatron's TransformerConfig.

        Raises:
            ConfigError: If activations are recomputed. A backward pass would then use another micro-batch's choice.
        """
        if config.moe_enable_routing_replay and config.recompute_granularity is not None:
            raise ConfigError(
                f"rollout.enable_rollout_routing_replay=true does not go with recompute_granularity="
                f"{config.recompute_granularity}"
            )
        self._sequence_parallel = bool(config.sequence_parallel)
        self._routers = {id(chunk): list(_routers(chunk)) for chunk in chunks}

    def replay(self, chunk: Any, experts: Experts | None, *, device: torch.device) -> None:
        """Fixes the experts of the next forward pass of a chunk, or leaves the choice to the routers.

        Args:
            chunk: One of this object's chunks.
            experts: The micro-batch's experts for all layers of the model, ``[b, s, layers, top_k]``; None: no replay.
            device: The model's device.
        """
        if experts is None:
            for _, router in self._routers[id(chunk)]:
                router.router_replay_action = None
            return
        # Megatron orders tokens by sequence position first.
        whole = torch.tensor(experts, dtype=torch.int64, device=device).transpose(0, 1)
        mine = self._part(whole)
        for layer, router in self._routers[id(chunk)]:
            # Not by its setter, which also keeps every one of them for activation recomputation.
            router.target_topk_idx = mine[:, :, layer].reshape(-1, mine.shape[-1])
            router.router_replay_action = RouterReplayAction.REPLAY_FORWARD

    def _part(self, whole: Tensor) -> Tensor:
        if not self._sequence_parallel:
            return whole
        part = len(whole) // parallel_state.get_tensor_model_parallel_world_size()
        start = part * parallel_state.get_tensor_model_parallel_rank()
        return whole[start : start + part]


def _routers(chunk: torch.nn.Module) -> Iterator[tuple[int, Any]]:
    """Yields each router's layer, counted from 0 over the whole model, and its RouterReplay."""
    for module in chunk.modules():
        router: Any = module
        if getattr(router, "router_replay", None) is not None:
            yield int(router.layer_number) - 1, router.router_replay
