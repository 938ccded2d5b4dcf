"""ms-swift's vLLM server of Ray mode with our extension of vLLM's worker. Importing this imports ms-swift, not vLLM."""

from __future__ import annotations

from typing import Any

from swift.ray.megatron.rollout import ray_vllm_engine
from swift.ray.megatron.rollout.ray_vllm_engine import RayVllmEngine
from swift.ray.megatron.rollout.vllm_server import VllmServer

from rl_safe_workers.adapters.patches import replaced
from rl_safe_workers.rollout.sync_proof import HeldWeights

EXTENSION = "rl_safe_workers.adapters.swift.proved_extension.ProvedSwiftExtension"


class ProvedVllmEngine(RayVllmEngine):
    """ms-swift's engine with our worker extension."""

    @staticmethod
    async def _create_engine_async(*args: Any, engine_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        proving = {**engine_kwargs, "worker_extension_cls": EXTENSION}
        return await RayVllmEngine._create_engine_async(*args, engine_kwargs=proving, **kwargs)


class ProvedServer(VllmServer):
    """ms-swift's server, a Ray actor, with our engine."""

    def launch_server(self, **settings: Any) -> Any:
        """Starts the engine as ms-swift does."""
        with replaced(ray_vllm_engine, "RayVllmEngine", lambda stock: ProvedVllmEngine):
            return super().launch_server(**settings)

    def rl_safe_prove(self) -> str | None:
        """Calls `ProvedWorker.rl_safe_prove` on all workers. Returns the first reason against a proof, if any."""
        return next(filter(None, self._asked("rl_safe_prove")), None)

    def rl_safe_held(self) -> HeldWeights | None:
        """Returns the weights that the engine holds after the last sync; None if no weights were received."""
        return HeldWeights.of_workers(self._asked("rl_safe_held"))

    def _asked(self, method: str) -> Any:
        """Returns the answers of the engine's workers, by rank."""
        return self._engine._run_in_loop(self._engine.engine.collective_rpc(method))
