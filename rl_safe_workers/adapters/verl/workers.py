"""verl's workers with the timeout from verl's configuration, a phase for weight syncs, our metrics and an agreed end.

verl's driver can call a method only if the method has verl's decorator ``register``. An override without it silently
becomes unavailable to the driver.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from rl_safe_workers.adapters.given_comms import world_backend
from rl_safe_workers.adapters.hosting import limited_world
from rl_safe_workers.adapters.rank_answers import listen
from rl_safe_workers.adapters.verl import environment
from rl_safe_workers.adapters.verl.coroutine_update import CoroutineUpdate, RolloutCalls
from rl_safe_workers.adapters.verl.process import existing_process, trainer_process
from rl_safe_workers.adapters.verl.settings import STRATEGY
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.rollout.sync_proof import SentWeights

logger = logging.getLogger(__name__)

_MAY_HAVE_STAGES = 2
"""Number of pipeline stages that is assumed if an engine's configuration does not say."""


class _Calls:
    """Calls that our driver makes on every worker."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rl_safe_metrics(self) -> dict[str, float]:
        """Returns this rank's metrics of the adapter; empty if the process has none of our engines."""
        process = existing_process()
        return {} if process is None else process.metrics()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def teardown_groups(self, failure: str | None = None) -> dict[int, str]:
        """Ends this process's groups, in agreement with all ranks. Idempotent. Collective over: the training world.

        Args:
            failure: One line about a failure here or in the driver; None if nothing has failed.

        Returns:
            Failures by training rank; empty if no rank has failed.
        """
        process = existing_process()
        return {} if process is None else process.trainer.teardown(failure)


class SafeTrainingWorker(_Calls, TrainingWorker):
    """verl's training worker with one of our engines. A critic is such a worker; an actor contains one."""

    def __init__(self, config: Any) -> None:
        """Creates the default group with the configured timeout, then continues as verl does.

        Raises:
            ConfigError: If verl has chosen its own engine.
        """
        listen()
        settings, is_cpu = environment.settings(), environment.is_cpu()
        backend = "gloo" if is_cpu else None
        stages = getattr(config.engine_config, "pipeline_model_parallel_size", _MAY_HAVE_STAGES)
        if settings.release_comms:
            backend = world_backend(is_cpu=is_cpu, sends_unbatched=stages > 1)
        # verl passes no timeout (engine_workers.py:89), and returns early if a group exists.
        with limited_world(settings.bootstrap, stages=stages, carries_weights=settings.packed_sync):
            initialize_global_process_group_ray(settings.nccl_timeout, backend=backend)
        super().__init__(config)
        if self.engine_config.strategy == STRATEGY and not hasattr(self.engine, "process"):
            raise ConfigError(
                f"verl has chosen {type(self.engine).__name__}, which is not ours: the plugin has not been loaded in "
                f"this worker; set {environment.ENGINE_VENDOR}={environment.VENDOR} and "
                f"{environment.EXTERNAL_MODULES}={environment.PLUGIN} for the whole job"
            )


class _Syncs(_Calls):
    """The calls of a worker that also sends weights to the rollout."""

    rollout: Any
    checkpoint_engine: Any

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rl_safe_prove(self) -> None:
        """Makes this rank take digests of the weights that it packs in the next sync.

        If the sync is not packed, rank 0 takes digests of all weights, and the other ranks take none.
        """
        trainer_process().prove_sync()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rl_safe_sent(self) -> SentWeights:
        """Returns the digests taken since `rl_safe_prove`, and stops taking them."""
        return trainer_process().sent_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Sends weights as verl does, as phase ``sync``. Collective over: the training world.

        Raises:
            PhaseTimeoutError: If the sync does not end in time; names the ranks or the engine that it waits for.
        """
        stock = functools.partial(super().update_weights, global_steps=global_steps, mode=mode)  # type: ignore[misc]
        return await CoroutineUpdate(trainer_process(), stock, calls=self._rollout_calls).run()

    @functools.cached_property
    def _rollout_calls(self) -> RolloutCalls:
        give = functools.partial(trainer_process().given.give, Phase.SYNC)
        return RolloutCalls([self.rollout, self.checkpoint_engine], before_cache=give)


class SafeActorRolloutRefWorker(_Syncs, ActorRolloutRefWorker):
    """verl's actor, rollout and reference worker over our training workers."""

    actor_worker_cls = SafeTrainingWorker
    ref_worker_cls = SafeTrainingWorker


class SafeDetachActorWorker(_Syncs, DetachActorWorker):
    """The same worker, for trainers that keep copies of the actor's weights."""

    actor_worker_cls = SafeTrainingWorker
    ref_worker_cls = SafeTrainingWorker


_SAFE: dict[type, type] = {
    TrainingWorker: SafeTrainingWorker,
    ActorRolloutRefWorker: SafeActorRolloutRefWorker,
    DetachActorWorker: SafeDetachActorWorker,
}


def safe_worker(stock: type) -> type:
    """Returns our class that replaces one of verl's worker classes.

    Raises:
        ConfigError: If there is no replacement.
    """
    if stock in _SAFE.values():
        return stock
    if stock not in _SAFE:
        known = ", ".join(sorted(cls.__name__ for cls in _SAFE))
        raise ConfigError(f"worker class {stock.__name__} is not supported; supported are {known}")
    return _SAFE[stock]
