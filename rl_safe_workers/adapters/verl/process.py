"""One trainer process of verl's: its place in the training world, shared by all the engines in it.

verl creates the default group and Megatron's groups, and since 0.7.1 the default group holds trainers alone. So the
training world is not made here but taken as it is found.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.adapters.hosting import HostedTrainer, HostGroups, sizes_of_groups
from rl_safe_workers.adapters.verl import environment
from rl_safe_workers.adapters.verl.host_groups import DELTA_KEYS, verl_groups
from rl_safe_workers.adapters.verl.pending import PendingSave
from rl_safe_workers.adapters.verl.settings import NODE, VerlSettings
from rl_safe_workers.adapters.verl.tracker import StepTracker
from rl_safe_workers.comms.groups import create_megatron_groups
from rl_safe_workers.config import MegatronConfig
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.topology.budget import NCCL_MAXIMUM
from rl_safe_workers.topology.groups import Features

logger = logging.getLogger(__name__)

_FINISHES_SAVES = frozenset({Phase.LOAD, Phase.TEARDOWN})
"""Phases that begin by finishing every save in the background."""


class TrainerProcess(HostedTrainer):
    """What the engines of one process share: phases with deadlines, the bootstrap, saves in flight, the teardown."""

    _without_groups = "build the engine first"

    def __init__(self, settings: VerlSettings) -> None:
        """Takes the default group as the training world. Not collective."""
        self.settings = settings
        self.save_seconds = 0.0
        self.tracker = StepTracker()
        self._bootstrapped: set[Features] = set()
        self._engines = 0
        self._pending: list[PendingSave] = []
        self.take_world(settings.rl_safe())

    def add_engine(self, *, is_critic: bool, background: bool) -> str:
        """Names an engine of this process that saves, alike on every rank.

        Args:
            is_critic: Whether it is a critic's.
            background: Whether its saves are to go on while verl trains.
        """
        self._engines += 1
        name = f"{'critic' if is_critic else 'actor'}-{self._engines}"
        self.tracker.add(name, background=background, is_critic=is_critic)
        return name

    @property
    def outside_timeout(self) -> timedelta:
        """As `HostedTrainer.outside_timeout`."""
        return timedelta(seconds=self.settings.nccl_timeout)

    @contextmanager
    def creating_groups(self, features: Features, engine: Any) -> Iterator[None]:
        """Creates Megatron's groups, and wraps the host's own creation, which does nothing where there are any.

        verl gives Megatron no limits of NCCL's channels (transformer_impl.py:271), and takes groups as it finds them.

        Collective over: the training world.

        Args:
            features: Of the first engine's model; the engines of a process share its groups.
            engine: verl's ``McoreEngineConfig``.
        """
        if self.lifecycle.has_completed(Phase.GROUPS):
            yield
            return
        with self.phase(Phase.GROUPS):
            self.features = features
            # Groups for dynamic context parallelism are verl's to check and create.
            if not engine.dynamic_context_parallel and not parallel_state.model_parallel_is_initialized():
                self._create_groups(engine)
            yield
            self.megatron = sizes_of_groups()
            if self._has_nccl:
                self._check_memory(self.plan_comms())

    def _create_groups(self, engine: Any) -> None:
        self.megatron = MegatronConfig(
            tensor_model_parallel_size=engine.tensor_model_parallel_size,
            pipeline_model_parallel_size=engine.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=engine.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=engine.expert_model_parallel_size,
            expert_tensor_parallel_size=engine.expert_tensor_parallel_size or engine.tensor_model_parallel_size,
            context_parallel_size=engine.context_parallel_size,
        )
        if self._has_nccl:
            self._limits = self.wanted_limits()
        create_megatron_groups(
            self.megatron, timeout=self.remaining(), limits=self._limits if self._has_nccl else None,
            with_gloo_twins=True,
        )  # fmt: skip

    def host_groups(self) -> HostGroups:
        """As `HostedTrainer.host_groups`."""
        return verl_groups(delta_weights=self.settings.delta_weights)

    def models(self) -> Collection[Features]:
        """As `HostedTrainer.models`: this engine's, with the dispatcher of each engine of the job."""
        (own,) = super().models()
        return {own, *(replace(own, moe_dispatcher=dispatcher) for dispatcher in self.settings.dispatchers)}

    def unlimited(self) -> Collection[str]:
        """As `HostedTrainer.unlimited`."""
        if not self.settings.delta_weights or self.megatron.pipeline_model_parallel_size > 1:
            return ()
        experts = self.megatron.expert_model_parallel_size * self.megatron.expert_tensor_parallel_size
        sizes = zip(DELTA_KEYS, (self.megatron.tensor_model_parallel_size, experts), strict=True)
        return [key for key, size in sizes if size > 1]

    def connect(self, features: Features) -> None:
        """Connects every communicator for what models like this one need. Collective over: the training world."""
        if features in self._bootstrapped:
            return
        self.features = features
        self._check_limits()
        self.plan_comms().check_backend(dist.get_backend_config())
        self.bootstrap()
        self._bootstrapped.add(features)

    def _check_limits(self) -> None:
        """Warns of groups with fewer channels than this engine would give them: an engine before it has made them."""
        wanted = self.wanted_limits()
        if narrow := [key for key, limit in self._limits.items() if wanted.get(key, NCCL_MAXIMUM) > limit]:
            logger.warning(
                "training rank %d: an engine shares groups that have fewer channels than it needs: %s; set %s",
                self.training_rank, ", ".join(narrow),
                " ".join(f"{NODE}.bootstrap.max_ctas.{key}={wanted.get(key, NCCL_MAXIMUM)}" for key in narrow),
            )  # fmt: skip

    def check_phase(self, phase: Phase) -> None:
        """Finishes saves in the background before a phase that they must not reach into; else moves them on."""
        super().check_phase(phase)
        if phase in _FINISHES_SAVES:
            self.finish_saves()
        else:
            self.poll_saves()

    def follow(self, save: PendingSave) -> None:
        """Sees to the end of a save in the background."""
        self._pending.append(save)

    def poll_saves(self) -> None:
        """Finalises saves in the background once all of them are written. Not collective; does not wait."""
        still = [save.is_in_progress() for save in self._pending]
        # A failure is raised by `finish_saves`, on every rank.
        if not any(still) and not any(save.has_failed for save in self._pending):
            self._finalise()

    def finish_saves_before(self, engine: str, step_folder: Path) -> None:
        """Finishes saves in the background before an engine's next; those of the same step by others go on.

        Raises:
            CheckpointError: As `finish_saves`.
            PhaseTimeoutError: As `finish_saves`.
        """
        if any(save.engine == engine or save.step_folder != step_folder for save in self._pending):
            self.finish_saves()

    def finish_saves(self) -> None:
        """Waits for saves in the background and finalises them. Collective over: the training world, by the store.

        Raises:
            CheckpointError: On every rank, if one has failed.
            PhaseTimeoutError: Naming the ranks that have not written in time.
        """
        try:
            for save in self._pending:
                save.finish(self.timeout(Phase.SAVE))
            self._finalise()
        finally:
            self._pending = []

    def _finalise(self) -> None:
        pending, self._pending = self._pending, []
        for save in pending:
            save.finalise()
        self.tracker.name(writes=self.training_rank == 0)

    def give_up(self, reason: str) -> None:
        """Gives up saves in the background, so that the others need not wait for this rank."""
        super().give_up(reason)
        pending, self._pending = self._pending, []
        for save in pending:
            save.abandon(reason)

    def metrics(self) -> dict[str, float]:
        """What this rank has to tell of the adapter, under the names of verl's metrics.

        Of saves, what they took since the last call.
        """
        found = {"rl_safe/active": 1.0, "rl_safe/saves_in_background": float(len(self._pending))}
        if self.report is not None:
            found["rl_safe/bootstrap_groups"] = float(self.report.groups)
            found["rl_safe/bootstrap_mib"] = (self.report.bytes or 0) / 2**20
            found["rl_safe/late_allocations"] = float(len(self.late_allocations()))
            found["timing_s/rl_safe_bootstrap"] = self.report.seconds
        if self.save_seconds:
            # Told once, though worker groups of one process ask in turn: the trainer takes the largest answer.
            found["timing_s/rl_safe_save"], self.save_seconds = self.save_seconds, 0.0
        return found


_process: TrainerProcess | None = None


def trainer_process() -> TrainerProcess:
    """The one of this process, made at the first call, when the default group exists."""
    global _process
    if _process is None:
        _process = TrainerProcess(environment.settings())
    return _process


def existing_process() -> TrainerProcess | None:
    """The one of this process, if an engine has made it."""
    return _process
