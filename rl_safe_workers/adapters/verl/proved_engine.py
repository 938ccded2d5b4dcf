"""Makes verl's vLLM engines read their weights back after a sync. Importing this module imports vLLM.

verl takes the replica's class from a registry, the server's class from the replica, and the name of the worker's
extension from the server. Each class here is verl's with some more calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from rl_safe_workers.rollout.packing import spec_of
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.proved_worker import ProvedWorker
from rl_safe_workers.rollout.sync_proof import HeldWeights


class ProvedWorkerExtension(ProvedWorker, vLLMColocateWorkerExtension):
    """verl's part of a vLLM worker. It reads weights back after a sync that is to be proved."""

    _rl_safe_specs: tuple[WeightSpec, ...] = ()
    """The weights that were received in this sync."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Receives weights as verl does. Reads them back if they are to be proved."""
        self._rl_safe_specs = ()
        with self._rl_safe_proving():
            super().update_weights_from_ipc(*args, **kwargs)

    def _update_weights(self, weights: Sequence[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> None:
        if self._rl_safe_is_due:
            self._rl_safe_specs += tuple(spec_of(name, tensor) for name, tensor in weights)
        super()._update_weights(weights, *args, **kwargs)

    def _iter_all_models_with_config(self) -> Iterator[tuple[Any, Any]]:
        # verl calls this after the loaders have written all weights and before layers convert them.
        self._rl_safe_watch(self._rl_safe_specs)
        yield from super()._iter_all_models_with_config()


class ProvedServer(vLLMHttpServer):
    """verl's server of an engine, with our worker extension."""

    def _get_worker_extension_cls(self) -> str:
        return f"{ProvedWorkerExtension.__module__}.{ProvedWorkerExtension.__qualname__}"

    async def rl_safe_prove(self) -> str | None:
        """Calls `ProvedWorkerExtension.rl_safe_prove` on the engine's workers. Returns the first reason, if any."""
        return next(filter(None, await self.engine.collective_rpc("rl_safe_prove")), None)

    async def rl_safe_held(self) -> HeldWeights | None:
        """Returns the weights that the engine holds after the last sync; None if no weights were received."""
        return HeldWeights.of_workers(await self.engine.collective_rpc("rl_safe_held"))


class ProvedReplica(vLLMReplica):
    """verl's replica with our server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Makes verl's replica, and sets our server."""
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(ProvedServer)


def use_replicas() -> None:
    """Makes verl start our replicas instead of its own for vLLM, in this process."""
    RolloutReplicaRegistry.register("vllm", lambda: ProvedReplica)
