"""NeMo RL's generation workers, whose vLLM has our part of a worker. Importing it imports NeMo RL, and not vLLM."""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from rl_safe_workers.rollout.sync_proof import HeldWeights

EXTENSION = "rl_safe_workers.adapters.nemo_rl.vllm_extension.ProvedVllmExtension"


class ProvedGenerationWorkerImpl(VllmGenerationWorkerImpl):
    """Without Ray, to be derived from: NeMo RL's own is split in the same way."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine({**llm_kwargs, "worker_extension_cls": EXTENSION})

    def rl_safe_prove(self) -> str | None:
        """As `ProvedWorker.rl_safe_prove`."""
        reason: str | None = self.llm.collective_rpc("rl_safe_prove")[0]
        return reason

    def rl_safe_held(self) -> HeldWeights | None:
        """Returns the weights that the last refit has left; None if none has come."""
        held = self.llm.collective_rpc("rl_safe_held")[0]
        return None if held is None else HeldWeights(**held)


class ProvedAsyncGenerationWorkerImpl(VllmAsyncGenerationWorkerImpl):
    """The same over vLLM's asynchronous engine."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        super()._create_engine({**llm_kwargs, "worker_extension_cls": EXTENSION})

    async def rl_safe_prove(self) -> str | None:
        """As `ProvedWorker.rl_safe_prove`."""
        reason: str | None = (await self.llm.collective_rpc("rl_safe_prove"))[0]
        return reason

    async def rl_safe_held(self) -> HeldWeights | None:
        """Returns the weights that the last refit has left; None if none has come."""
        held = (await self.llm.collective_rpc("rl_safe_held"))[0]
        return None if held is None else HeldWeights(**held)


# The names that NeMo RL's profiler settings know.
@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")})
class ProvedGenerationWorker(ProvedGenerationWorkerImpl):
    """Stands in for NeMo RL's ``VllmGenerationWorker``."""


@ray.remote(runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")})
class ProvedAsyncGenerationWorker(ProvedAsyncGenerationWorkerImpl):
    """Stands in for NeMo RL's ``VllmAsyncGenerationWorker``."""
