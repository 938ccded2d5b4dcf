"""verl's Megatron engines with our bootstrap, phases, saves and loads. Importing this imports Megatron."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from verl.utils.megatron_utils import (
    get_megatron_module_device,
    load_megatron_model_to_gpu,
    offload_megatron_model_to_cpu,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithLMHead, MegatronEngineWithValueHead

from rl_safe_workers.adapters.verl import environment, local_layers
from rl_safe_workers.adapters.verl.checkpoint import SafeCheckpointManager
from rl_safe_workers.adapters.verl.features import features_of
from rl_safe_workers.adapters.verl.packed_sync import PackedSync
from rl_safe_workers.adapters.verl.process import TrainerProcess, trainer_process
from rl_safe_workers.compat.param_gathers import complete_param_gathers
from rl_safe_workers.lifecycle import Phase

logger = logging.getLogger(__name__)


class SafeEngineMixin:
    """Overrides methods that verl calls on its Megatron engines."""

    process: TrainerProcess
    model_config: Any
    engine_config: Any
    module: Any
    checkpoint_mananager: Any
    """verl's spelling."""
    is_value_model: bool
    _is_offload_param: bool

    def _init_device_mesh(self) -> None:
        """Creates Megatron's groups and connects them, while the device holds neither a model nor vLLM.

        Collective over: the training world.
        """
        if environment.is_cpu():
            from rl_safe_workers.adapters.verl import cpu_platform

            cpu_platform.apply()
        local_layers.apply()
        self.process = trainer_process()
        environment.check_packed_sync()
        features = features_of(
            self.model_config.hf_config, self.engine_config, weights_over_world=self.process.settings.packed_sync
        )
        with self.process.creating_groups(features, self.engine_config):
            super()._init_device_mesh()  # type: ignore[misc]
        self.process.connect(features)
        # A warning, because verl shows no lower log level of its workers.
        logger.warning(
            "rl_safe active: %s on training rank %d of %d",
            type(self).__name__,
            self.process.trainer.training_rank,
            self.process.trainer.training_size,
        )

    def initialize(self) -> None:
        """Builds the model as verl does, and replaces verl's checkpoint manager by ours."""
        super().initialize()  # type: ignore[misc]
        if self.engine_config.forward_only:
            return
        name = self.process.add_engine(
            is_critic=self.is_value_model, background=bool(self.checkpoint_mananager.checkpoint_config.async_save)
        )
        self.checkpoint_mananager = SafeCheckpointManager.take_over(self.checkpoint_mananager, self.process, name)

    def train_mode(self, **settings: Any) -> Any:
        """Takes the communicators' memory back for verl, which gathers token counts before `train_batch`."""
        self.process.given.take_back()
        return super().train_mode(**settings)  # type: ignore[misc]

    def eval_mode(self, **settings: Any) -> Any:
        """Takes the communicators' memory back before verl fills the device with the engine's state."""
        self.process.given.take_back()
        return super().eval_mode(**settings)  # type: ignore[misc]

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        """Runs one update as phase ``train``. Collective over: the training world.

        Raises:
            PhaseTimeoutError: If a rank does not come in time; names it.
        """
        self.process.has_trained = True
        with self.process.trainer.phase(Phase.TRAIN):
            return super().train_batch(data, loss_function)  # type: ignore[misc]

    def infer_batch(self, data: Any, loss_function: Callable[..., Any] | None = None) -> Any:
        """Runs one forward batch as phase ``logprob``. Collective over: the training world. Raises as `train_batch`."""
        with self.process.trainer.phase(Phase.LOGPROB):
            return super().infer_batch(data, loss_function)  # type: ignore[misc]

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves state between device and host. Raises LifecycleError on a move to the host before the bootstrap."""
        if device == "cpu":
            self.process.trainer.comms.require("offload")
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)  # type: ignore[misc]

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the weights that a sync sends. Raises LifecycleError before the bootstrap.

        If the sync is to be proved, this also takes digests of the weights. In a packed sync, the tensors are a plan
        and buckets; see `packed_updates`.
        """
        self.process.trainer.comms.require("weight sync")
        weights, peft_config = super().get_per_tensor_param(*args, **kwargs)  # type: ignore[misc]
        digests = self.process.digests
        if digests is not None and self.process.trainer.training_rank == 0:
            weights = digests.passing(weights)  # verl's own export brings the same weights to every rank
        if self._packed_sync is not None and peft_config is None:
            self.process.sync_is_packed = self._packed_sync.is_ready
            return self._gathered(self._packed_sync.weights(weights, digests)), peft_config
        return self._gathered(weights), peft_config

    @functools.cached_property
    def _packed_sync(self) -> PackedSync | None:
        settings = self.process.settings
        return PackedSync(self, host_bytes=settings.bucket_megabytes * 2**20) if settings.packed_sync else None

    def _gathered(self, weights: Iterable[Any]) -> Iterator[Any]:
        """Yields the weights. Sets ``is_gathering`` while this rank gathers them with other training ranks."""
        remaining, end = iter(weights), object()
        # Only now, because verl may just have brought the parameters back from the host.
        complete_param_gathers(self.module)
        while True:
            self.process.is_gathering = True
            try:
                weight = next(remaining, end)
            finally:
                self.process.is_gathering = False
            if weight is end:
                return
            yield weight
            del weight  # before the next one is made

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves as verl does, but without verl's last barrier, because our saves end in an agreement.

        Collective over: the training world, within ``timeouts.save``.
        """
        if self._is_offload_param or get_megatron_module_device(self.module) == "cpu":
            load_megatron_model_to_gpu(self.module, load_grad=True)
        self.checkpoint_mananager.save_checkpoint(
            local_path=local_path, hdfs_path=hdfs_path, global_step=global_step, max_ckpt_to_keep=max_ckpt_to_keep
        )
        if self._is_offload_param:
            offload_megatron_model_to_cpu(self.module)


class SafeMegatronEngine(SafeEngineMixin, MegatronEngineWithLMHead):
    """verl's language model engine with our overrides."""


class SafeMegatronValueEngine(SafeEngineMixin, MegatronEngineWithValueHead):
    """verl's value model engine with our overrides."""


_ENGINES = {"language_model": SafeMegatronEngine, "value_model": SafeMegatronValueEngine}
_DEVICES = ["cuda", "cpu"]
"""Devices for which our engines are registered. verl asks for ``cpu`` only on our CPU platform."""


def is_registered() -> bool:
    """Returns True if verl's registry has our engines."""
    return any(engine in EngineRegistry._engines[kind]["megatron"].values() for kind, engine in _ENGINES.items())


def register() -> None:
    """Adds our engines to verl's registry under our vendor key. verl's own engines stay there. Idempotent."""
    if is_registered():
        return
    for kind, engine in _ENGINES.items():
        EngineRegistry.register(model_type=kind, backend="megatron", device=_DEVICES, vendor=environment.VENDOR)(engine)
