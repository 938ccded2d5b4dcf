"""One trainer process of verl's: its place in the training world, shared by all the engines in it.

verl creates the default group and Megatron's groups, and since 0.7.1 the default group holds trainers alone. So the
training world is not made here but taken as it is found.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.adapters.hosting import HostedTrainer, HostGroups, device_of_world, sizes_of_groups
from rl_safe_workers.adapters.verl import environment
from rl_safe_workers.adapters.verl.host_groups import verl_groups
from rl_safe_workers.adapters.verl.pending import PendingSave
from rl_safe_workers.adapters.verl.settings import VerlSettings
from rl_safe_workers.comms.groups import create_megatron_groups, set_group_timeouts
from rl_safe_workers.config import MegatronConfig
from rl_safe_workers.errors import CheckpointError, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.worlds.training_world import TrainingWorld

_FINISHES_SAVES = frozenset({Phase.LOAD, Phase.TEARDOWN})
"""Phases that begin by finishing every save in the background."""
_HEARD = timedelta(seconds=5)
"""How long a rank that has failed alone waits for the others to hear of it."""


class TrainerProcess(HostedTrainer):
    """What the engines of one process share: phases with deadlines, the bootstrap, saves in flight, the teardown."""

    _without_groups = "build the engine first"

    def __init__(self, settings: VerlSettings) -> None:
        """Takes the default group as the training world. Not collective."""
        rank, size = dist.get_rank(), dist.get_world_size()
        self.settings = settings
        self.save_seconds = 0.0
        self._bootstrapped: set[Features] = set()
        self._engines = 0
        self._pending: list[PendingSave] = []
        self.setup_worker(
            training_rank=rank, training_size=size, rl_safe=settings.rl_safe(), megatron=MegatronConfig(),
            device=device_of_world(),
        )  # fmt: skip
        with self.lifecycle.enter(Phase.WORLD):
            # A connection of its own: NCCL waits in the group's for peers, and would keep everyone else out.
            connection: Store = c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self.store = PrefixStore("rl_safe", connection)
            self.world = TrainingWorld(training_rank=rank, size=size, joint_ranks=tuple(range(size)))
            self._open_roll_call()

    def add_engine(self, role: str) -> str:
        """Names an engine of this process, alike on every rank."""
        self._engines += 1
        return f"{role}-{self._engines}"

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """As `SafeWorker.phase`; outside of phases collectives time out after ``nccl_timeout``."""
        with super().phase(phase):
            try:
                yield
            finally:
                set_group_timeouts(timedelta(seconds=self.settings.nccl_timeout))

    @contextmanager
    def creating_groups(self, features: Features, engine: Any) -> Iterator[None]:
        """Creates Megatron's groups, and wraps the host's own creation, which does nothing where there are any.

        verl gives Megatron no limits of NCCL's channels (transformer_impl.py:271), and takes groups as it finds them.

        Collective over: the training world.

        Args:
            features: Of the first engine's model, for the limits; the engines of a process share its groups.
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
        return verl_groups()

    def connect(self, features: Features) -> None:
        """Connects every communicator for what models like this one need. Collective over: the training world."""
        if features in self._bootstrapped:
            return
        self.features = features
        self.plan_comms().check_backend(dist.get_backend_config())
        self.report = self.bootstrap()
        self._bootstrapped.add(features)

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
        if self._pending and not any(still) and not any(save.has_failed for save in self._pending):
            self._finalise()

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
        # All of a step's together: the actor's names the step as the newest, which a critic's must have been saved for.
        pending, self._pending = self._pending, []
        for save in pending:
            save.finalise()

    def give_up(self, reason: str) -> None:
        """Gives up saves in the background, so that the others need not wait for this rank."""
        super().give_up(reason)
        pending, self._pending = self._pending, []
        for save in pending:
            save.abandon(reason)

    def fail(self, phase: Phase, error: Exception) -> NoReturn:
        """Tells the others of a failure of this rank alone, which has an agreement with them ahead; raises it."""
        self._deadline_s = min(self._deadline_s, time.monotonic() + _HEARD.total_seconds())
        try:
            self.together(phase, lambda: None, failure=error)
        except PhaseTimeoutError:
            raise CheckpointError(f"training rank {self.training_rank}: {type(error).__name__}: {error}") from error
        raise AssertionError("an agreement with a failure raises")

    def metrics(self) -> dict[str, float]:
        """What this rank has to tell of the adapter, under the names of verl's metrics."""
        found = {"rl_safe/active": 1.0, "rl_safe/saves_in_background": float(len(self._pending))}
        if self.report is not None:
            found["rl_safe/bootstrap_groups"] = float(self.report.groups)
            found["rl_safe/bootstrap_mib"] = (self.report.bytes or 0) / 2**20
            found["rl_safe/late_allocations"] = float(len(self.late_allocations()))
            found["timing_s/rl_safe_bootstrap"] = self.report.seconds
        if self.save_seconds:
            found["timing_s/rl_safe_save"] = self.save_seconds
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
