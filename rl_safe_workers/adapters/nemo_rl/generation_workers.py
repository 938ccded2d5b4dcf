"""NeMo RL's generation workers with our extension of vLLM's worker. Importing this imports NeMo RL, but not vLLM."""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from rl_safe_workers.rollout.sync_proof import HeldWeights

EXTENSION = "rl_safe_workers.adapters.nemo_rl.vllm_extension.SafeVllmExtension"


class SafeGenerationWorkerImpl(VllmGenerationWorkerImpl):
    """The worker without Ray, as a base class. NeMo RL splits its own worker in the same way."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine({**llm_kwargs, "worker_extension_cls": EXTENSION})

    def rl_safe_engine(self) -> dict[str, Any]:
        """Returns what `SafeVllmExtension.rl_safe_engine` returns on the first of vLLM's workers."""
        return dict(self.llm.collective_rpc("rl_safe_engine")[0])

    def rl_safe_join(self, first_rank: int, info: dict[str, Any]) -> None:
        """Calls `SafeVllmExtension.rl_safe_join` on vLLM's workers. Collective over: trainers and rollout ranks."""
        self.llm.collective_rpc("rl_safe_join", args=(first_rank, info))

    def rl_safe_leave(self) -> None:
        """Calls `SafeVllmExtension.rl_safe_leave` on vLLM's workers."""
        self.llm.collective_rpc("rl_safe_leave")

    def rl_safe_prove(self) -> str | None:
        """Calls `ProvedWorker.rl_safe_prove` on vLLM's workers. Returns the first reason against a proof, if any."""
        return next(filter(None, self.llm.collective_rpc("rl_safe_prove")), None)

    def rl_safe_held(self) -> HeldWeights | None:
        """Returns the weights that the engine holds after the last refit; None if no weights were received."""
        return HeldWeights.of_workers(self.llm.collective_rpc("rl_safe_held"))


class SafeAsyncGenerationWorkerImpl(VllmAsyncGenerationWorkerImpl):
    """The same worker over vLLM's asynchronous engine."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine({**llm_kwargs, "worker_extension_cls": EXTENSION})

    async def rl_safe_engine(self) -> dict[str, Any]:
        """Returns what `SafeVllmExtension.rl_safe_engine` returns on the first of vLLM's workers."""
        return dict((await self.llm.collective_rpc("rl_safe_engine"))[0])

    async def rl_safe_join(self, first_rank: int, info: dict[str, Any]) -> None:
        """Calls `SafeVllmExtension.rl_safe_join` on vLLM's workers. Collective over: trainers and rollout ranks."""
        await self.llm.collective_rpc("rl_safe_join", args=(first_rank, info))

    async def rl_safe_leave(self) -> None:
        """Calls `SafeVllmExtension.rl_safe_leave` on vLLM's workers."""
        await self.llm.collective_rpc("rl_safe_leave")

    async def rl_safe_prove(self) -> str | None:
        """Calls `ProvedWorker.rl_safe_prove` on vLLM's workers. Returns the first reason against a proof, if any."""
        return next(filter(None, await self.llm.collective_rpc("rl_safe_prove")), None)

    async def rl_safe_held(self) -> HeldWeights | None:
        """Returns the weights that the engine holds after the last refit; None if no weights were received."""
        return HeldWeights.of_workers(await self.llm.collective_rpc("rl_safe_held"))


# NeMo RL's profiler settings use these names.
@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class SafeGenerationWorker(SafeGenerationWorkerImpl):
    """Replaces NeMo RL's ``VllmGenerationWorker``."""


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")})
class SafeAsyncGenerationWorker(SafeAsyncGenerationWorkerImpl):
    """Replaces NeMo RL's ``VllmAsyncGenerationWorker``."""
