"""NeMo RL's generation workers with our extension of vLLM's worker. Importing this imports NeMo RL, but not vLLM."""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from rl_safe_workers.rollout.sync_proof import HeldWeights

EXTENSION = "rl_safe_workers.adapters.nemo_rl.vllm_extension.ProvedVllmExtension"


class ProvedGenerationWorkerImpl(VllmGenerationWorkerImpl):
    """The worker without Ray, as a base class. NeMo RL splits its own worker in the same way."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine({**llm_kwargs, "worker_extension_cls": EXTENSION})

    def rl_safe_prove(self) -> str | None:
        """Calls `ProvedWorker.rl_safe_prove` on vLLM's workers. Returns the first reason, if any."""
        return next(filter(None, self.llm.collective_rpc("rl_safe_prove")), None)

    def rl_safe_held(self) -> HeldWeights | None:
        """Returns the weights that the engine holds after the last refit; None if no weights were received."""
        return HeldWeights.of_workers(self.llm.collective_rpc("rl_safe_held"))


class ProvedAsyncGenerationWorkerImpl(VllmAsyncGenerationWorkerImpl):
    """The same worker over vLLM's asynchronous engine."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine({**llm_kwargs, "worker_extension_cls": EXTENSION})

    async def rl_safe_prove(self) -> str | None:
        """Calls `ProvedWorker.rl_safe_prove` on vLLM's workers. Returns the first reason, if any."""
        return next(filter(None, await self.llm.collective_rpc("rl_safe_prove")), None)

    async def rl_safe_held(self) -> HeldWeights | None:
        """Returns the weights that the engine holds after the last refit; None if no weights were received."""
        return HeldWeights.of_workers(await self.llm.collective_rpc("rl_safe_held"))


# NeMo RL's profiler settings use these names.
@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class ProvedGenerationWorker(ProvedGenerationWorkerImpl):
    """Replaces NeMo RL's ``VllmGenerationWorker``."""


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")})
class ProvedAsyncGenerationWorker(ProvedAsyncGenerationWorkerImpl):
    """Replaces NeMo RL's ``VllmAsyncGenerationWorker``."""
