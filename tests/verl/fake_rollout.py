"""A rollout that keeps what a weight sync sends, at the seam where verl has vLLM's; and our workers over it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.rollout import base

from rl_safe_workers.adapters.verl.workers import SafeActorRolloutRefWorker, SafeDetachActorWorker


class KeepingRollout(base.BaseRollout):
    """Keeps a digest of every weight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights: dict[str, str] = {}
        self.events: list[str] = []

    async def resume(self, tags: list[str]) -> None:
        self.events += [f"resume {tag}" for tag in tags]

    async def release(self) -> None:
        self.events.append("release")

    async def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], **kwargs: Any) -> None:
        self.weights = {name: _digest(tensor) for name, tensor in weights}
        self.events.append("update_weights")


base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.{KeepingRollout.__name__}"


class Hybrid(SafeActorRolloutRefWorker):
    """Our worker, which can be asked what its rollout has got."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def received(self) -> tuple[dict[str, str], list[str]]:
        return self.rollout.weights, self.rollout.events


class Detached(SafeDetachActorWorker):
    """Our worker with copies of the actor's weights, which can be asked what these are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Where there is no accelerator no memory can be pinned.
        torch.Tensor.pin_memory = lambda tensor, *args: tensor
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, str]:
        return {name: _digest(p) for chunk in self.actor.engine.module for name, p in chunk.module.named_parameters()}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
