"""Makes verl's vLLM engines take packed weight syncs, and read their weights back. Importing this module imports vLLM.

verl takes the replica's class from a registry, the server's class from the replica, and the name of the worker's
extension from the server. Each class here is verl's class with some more calls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import ray
import torch
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from rl_safe_workers.errors import first_line
from rl_safe_workers.rollout.packed_updates import PackedUpdates
from rl_safe_workers.rollout.packing import spec_of
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.proved_worker import ProvedWorker
from rl_safe_workers.rollout.sync_proof import HeldWeights

logger = logging.getLogger(__name__)


class SafeWorkerExtension(ProvedWorker, vLLMColocateWorkerExtension):
    """verl's part of a vLLM worker. It takes packed weights, and reads weights back after a sync that is proved."""

    _rl_safe_specs: tuple[WeightSpec, ...] = ()
    """The weights that were received in this sync."""

    @cached_property
    def _rl_safe_packed(self) -> PackedUpdates:
        parallel = self.model_runner.vllm_config.parallel_config
        replicas = parallel.data_parallel_size if parallel.enable_expert_parallel else 1
        return PackedUpdates(parts=parallel.tensor_parallel_size * parallel.pipeline_parallel_size * replicas)

    def rl_safe_learn_anew(self) -> None:
        """Makes the next packed sync go through the loaders, and learn the direct way anew."""
        self._rl_safe_packed.abandon()

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Receives weights as verl does. Reads them back if they are to be proved.

        Raises:
            WeightSyncError: If a part of a packed sync does not come, or does not belong to it.
        """
        self._rl_safe_specs, packed = (), self._rl_safe_packed
        obstacle_before = packed.obstacle
        try:
            with self._rl_safe_proving():
                super().update_weights_from_ipc(*args, **kwargs)
                packed.end(parameter for model in self._iter_all_models() for parameter in model.parameters())
        except Exception:
            packed.abandon()
            raise
        if packed.obstacle != obstacle_before:
            # A warning, because verl shows no lower log level of its workers.
            how = "straight into the model" if packed.obstacle is None else f"by the loaders: {packed.obstacle}"
            logger.warning("rl_safe: packed weight syncs now go %s", how)

    def _update_weights(self, weights: Sequence[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> None:
        load = super()._update_weights
        if PackedUpdates.is_packed(weights):
            self._rl_safe_packed.load(
                weights, [*self._iter_all_models()], lambda whole: load([*whole], *args, **kwargs)
            )
            if self._rl_safe_is_due:
                self._rl_safe_specs = self._rl_safe_packed.specs
            return
        if self._rl_safe_is_due:
            self._rl_safe_specs += tuple(spec_of(name, tensor) for name, tensor in weights)
        load(weights, *args, **kwargs)

    def _iter_all_models_with_config(self) -> Iterator[tuple[Any, Any]]:
        # verl calls this after the loaders have written all weights and before layers convert them.
        self._rl_safe_watch(self._rl_safe_specs)
        yield from super()._iter_all_models_with_config()


class SafeServer(vLLMHttpServer):
    """verl's server of an engine, with our worker extension."""

    def _get_worker_extension_cls(self) -> str:
        return f"{SafeWorkerExtension.__module__}.{SafeWorkerExtension.__qualname__}"

    async def rl_safe_prove(self) -> str | None:
        """Calls `ProvedWorker.rl_safe_prove` on all workers. Returns the first reason against a proof, if any."""
        return next(filter(None, await self.engine.collective_rpc("rl_safe_prove")), None)

    async def rl_safe_learn_anew(self) -> str | None:
        """Calls `SafeWorkerExtension.rl_safe_learn_anew` on the engine's workers.

        Returns:
            The reason why the workers cannot take packed weights; None if they can.
        """
        try:
            await self.engine.collective_rpc("rl_safe_learn_anew")
        except Exception as error:
            return (
                f"its workers did not take a call: {first_line(error)}; a worker_extension_cls must be derived from "
                f"{SafeWorkerExtension.__module__}.{SafeWorkerExtension.__qualname__}"
            )
        return None

    async def rl_safe_held(self) -> HeldWeights | None:
        """Returns the weights that the engine holds after the last sync; None if no weights were received."""
        return HeldWeights.of_workers(await self.engine.collective_rpc("rl_safe_held"))


class SafeReplica(vLLMReplica):
    """verl's replica with our server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Makes verl's replica, and sets our server."""
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(SafeServer)


def use_replicas() -> None:
    """Makes verl start our replicas instead of its own for vLLM, in this process."""
    RolloutReplicaRegistry.register("vllm", lambda: SafeReplica)
