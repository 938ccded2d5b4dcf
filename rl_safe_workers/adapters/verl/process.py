"""One trainer process of verl's, with its place in the training world. All engines in the process share it.

verl creates the default group and Megatron's groups. Since 0.7.1, the default group contains only trainers. So this
module adopts it as the training world, and makes no world of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.adapters.given_comms import GivenComms
from rl_safe_workers.adapters.hosting import HostedTrainer
from rl_safe_workers.adapters.verl import environment
from rl_safe_workers.adapters.verl.host_groups import DELTA_KEYS, verl_groups
from rl_safe_workers.adapters.verl.pending_saves import PendingSaves
from rl_safe_workers.adapters.verl.settings import VerlSettings
from rl_safe_workers.adapters.verl.tracker import StepTracker
from rl_safe_workers.comms.bootstrap import HostGroups
from rl_safe_workers.comms.megatron_groups import create_megatron_groups, sizes_of_groups
from rl_safe_workers.config import MegatronConfig
from rl_safe_workers.diagnostics.memory_growth import METRIC
from rl_safe_workers.errors import OUTSIDE
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.setting_names import bootstrap_setting
from rl_safe_workers.topology.budget import NCCL_MAXIMUM
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.workers.communicators import HostComms

logger = logging.getLogger(__name__)


class VerlComms(HostComms):
    """The collectives that verl issues in addition to Megatron's."""

    missing_groups = "build the engine first"
    makes_groups = True

    def __init__(self, settings: VerlSettings) -> None:
        self._settings = settings

    def groups(self) -> HostGroups:
        """Returns the groups that verl itself uses."""
        return verl_groups(delta_weights=self._settings.delta_weights)

    def models(self, own: Features) -> Collection[Features]:
        """Returns this engine's features, and a copy of them for the token dispatcher of each engine of the job."""
        return {own, *(replace(own, moe_dispatcher=dispatcher) for dispatcher in self._settings.dispatchers)}

    def unlimited(self, megatron: MegatronConfig) -> Collection[str]:
        """Returns the groups over which delta weights are gathered."""
        if not self._settings.delta_weights or megatron.pipeline_model_parallel_size > 1:
            return ()
        experts = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size
        sizes = zip(DELTA_KEYS, (megatron.tensor_model_parallel_size, experts), strict=True)
        return [key for key, size in sizes if size > 1]


class TrainerProcess(HostedTrainer):
    """The trainer that all engines of one process share. It has their phases, bootstrap, pending saves and teardown.

    Attributes:
        settings: The adapter's settings.
        save_seconds: Seconds that saves have taken since the metrics were last read.
        is_gathering: Whether this rank takes part in a gather of weights for a sync.
        sync_is_packed: Whether the current or the last weight sync is packed; None before the first sync, and without
            the setting ``packed_sync``.
        has_trained: Whether there was an update since the metrics were last read.
        tracker: Names a step once every engine has saved it.
        saves: The saves in the background.
        given: Gives the communicators' memory to the rollout, if the settings say so.
    """

    def __init__(self, settings: VerlSettings) -> None:
        """Takes the default group as the training world. Not collective."""
        self.settings = settings
        self.save_seconds = 0.0
        self.is_gathering = False
        self.sync_is_packed: bool | None = None
        self.has_trained = False
        self.tracker = StepTracker()
        self._bootstrapped: set[Features] = set()
        self._engines = 0
        timeout = timedelta(seconds=settings.nccl_timeout)
        self.take_world(
            settings.rl_safe(),
            comms=VerlComms(settings),
            outside_timeout=timeout,
            releases_comms=settings.release_comms,
        )
        self.saves = PendingSaves(self.trainer, self.tracker)
        # verl gathers token counts before it enters a phase of ours.
        self.given = GivenComms(
            self.trainer,
            taken_back_by="train_mode() or eval_mode() of an engine",
            remedy="start the job with rl_safe_workers.adapters.verl.main_ppo",
        )
        self.trainer.add_part(self.saves)
        self.trainer.add_part(self.given)

    def add_engine(self, *, is_critic: bool, background: bool) -> str:
        """Registers an engine of this process that saves; returns its name, which is the same on every rank.

        Args:
            is_critic: Whether it is the engine of a critic.
            background: Whether its saves run in the background while verl trains.
        """
        self._engines += 1
        name = f"{'critic' if is_critic else 'actor'}-{self._engines}"
        self.tracker.add(name, background=background, is_critic=is_critic)
        return name

    @contextmanager
    def creating_groups(self, features: Features, engine: Any) -> Iterator[None]:
        """Creates Megatron's groups. The body is verl's own creation, which does nothing if there are groups already.

        verl would create them without limits on NCCL's channels (transformer_impl.py:271), but it uses existing groups.

        Collective over: the training world.

        Args:
            features: Features of the first engine's model. All engines of the process share its groups.
            engine: verl's ``McoreEngineConfig``.
        """
        trainer = self.trainer
        if trainer.lifecycle.has_completed(Phase.GROUPS):
            yield
            return
        with trainer.phase(Phase.GROUPS):
            trainer.features = features
            # verl itself must check and create groups for dynamic context parallelism.
            if not engine.dynamic_context_parallel and not parallel_state.model_parallel_is_initialized():
                self._create_groups(engine)
            yield
            trainer.megatron = sizes_of_groups()
            trainer.comms.check_memory()

    def _create_groups(self, engine: Any) -> None:
        trainer = self.trainer
        trainer.megatron = MegatronConfig(
            tensor_model_parallel_size=engine.tensor_model_parallel_size,
            pipeline_model_parallel_size=engine.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=engine.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=engine.expert_model_parallel_size,
            expert_tensor_parallel_size=engine.expert_tensor_parallel_size or engine.tensor_model_parallel_size,
            context_parallel_size=engine.context_parallel_size,
        )
        if trainer.comms.has_nccl:
            trainer.comms.limits = trainer.comms.wanted_limits()
        create_megatron_groups(
            trainer.megatron,
            timeout=trainer.remaining(),
            limits=trainer.comms.limits if trainer.comms.has_nccl else None,
            with_gloo_twins=True,
        )

    def connect(self, features: Features) -> None:
        """Connects every communicator that models with these features need. Collective over: the training world."""
        if features in self._bootstrapped:
            return
        self.trainer.features = features
        self._check_limits()
        self.trainer.comms.plan().check_backend(dist.get_backend_config())
        self.trainer.comms.bootstrap()
        self._bootstrapped.add(features)
        self.given.check()

    def _check_limits(self) -> None:
        """Warns if an earlier engine has made groups with fewer channels than this engine needs."""
        wanted = self.trainer.comms.wanted_limits()
        if narrow := [key for key, limit in self.trainer.comms.limits.items() if wanted.get(key, NCCL_MAXIMUM) > limit]:
            logger.warning(
                "training rank %d: an engine shares groups that have fewer channels than it needs: %s; set %s",
                self.trainer.training_rank,
                ", ".join(narrow),
                ", ".join(bootstrap_setting(f"max_ctas.{key}={wanted.get(key, NCCL_MAXIMUM)}") for key in narrow),
            )

    def fail_with(self, error: BaseException) -> None:
        """Ends this rank's part of a failed job that has no driver, and logs where the failure began.

        Not collective; see `HostedTrainer.end_failed`. Does nothing if the rank has ended its part already.
        """
        if self._has_ended:
            return
        self._has_ended = True
        lifecycle = self.trainer.lifecycle
        with self.speaking():
            self.end_failed(error, str(lifecycle.current or lifecycle.last_failed or OUTSIDE))

    def metrics(self) -> dict[str, float]:
        """Returns this rank's metrics of the adapter, named in verl's style.

        The time of saves is the time since the last call.
        """
        found = {"rl_safe/active": 1.0, "rl_safe/saves_in_background": float(len(self.saves))}
        if self.has_trained:  # only once a step, although several worker groups of this process ask
            self.trainer.memory.step()
            self.has_trained = False
        found[METRIC] = self.trainer.memory.growth_mib
        comms = self.trainer.comms
        if comms.report is not None:
            found["rl_safe/bootstrap_groups"] = float(comms.report.groups)
            found["rl_safe/bootstrap_mib"] = (comms.report.bytes or 0) / 2**20
            found["rl_safe/kernels_mib"] = (comms.report.kernel_bytes or 0) / 2**20
            found["rl_safe/late_allocations"] = float(len(comms.late_allocations()))
            found["timing_s/rl_safe_bootstrap"] = comms.report.seconds
        if self.sync_is_packed is not None:
            found["rl_safe/sync_packed"] = float(self.sync_is_packed)
        # Only the first worker group of this process that asks gets these. The trainer uses the largest answer.
        if self.save_seconds:
            found["timing_s/rl_safe_save"], self.save_seconds = self.save_seconds, 0.0
        if self.given.seconds:
            found["rl_safe/released_mib"] = self.given.freed_bytes / 2**20
            found["timing_s/rl_safe_release"], self.given.seconds = self.given.seconds, 0.0
        return found


_process: TrainerProcess | None = None


def trainer_process() -> TrainerProcess:
    """Returns this process's `TrainerProcess`. The first call makes it; the default group must exist."""
    global _process
    if _process is None:
        _process = TrainerProcess(environment.settings())
    return _process


def existing_process() -> TrainerProcess | None:
    """Returns this process's `TrainerProcess`; None if no engine has made it."""
    return _process
