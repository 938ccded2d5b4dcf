"""One rank of the training world: its place, its settings, its phases with deadlines, and the parts that guard them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import Store

from rl_safe_workers.config import MegatronConfig, RlSafeConfig
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.failure import Failure
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import CheckpointError, LifecycleError, RunError
from rl_safe_workers.lifecycle import Lifecycle, Phase
from rl_safe_workers.ranks import TRAINING_WORLD, Role, trainer_ids
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.worlds.training_world import TrainingWorld, set_group_timeouts

T = TypeVar("T")

_ON_STORAGE = (Phase.SAVE, Phase.LOAD, Phase.CONVERT)
"""Phases in which an error that is not ours comes from a checkpoint or its storage."""


class MegatronHost(Protocol):
    """The interface that saves, loads and weight syncs need of a trainer's class: the model, however it was built."""

    chunks: list[Any]
    """Model chunks of this rank, wrapped in Megatron's DistributedDataParallel."""
    optimizer: Any
    """Megatron's DistributedOptimizer, or a chain of them."""

    def export_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every HF weight, whole, on every rank, in the same order.

        Collective over: the training world, at each item.
        """
        ...


class Part:
    """A part that keeps a trainer safe. The trainer calls it before, during and after each phase, and to abort."""

    def __init__(self, rank: TrainingRank) -> None:
        self.rank = rank

    def before(self, phase: Phase) -> None:
        """Prepares for a phase, or refuses it.

        Raises:
            RlSafeError: If the rank is not ready for the phase.
        """

    def during(self, phase: Phase) -> AbstractContextManager[object]:
        """Watches over a phase's body."""
        return nullcontext()

    def failed(self, phase: Phase, error: Exception) -> None:
        """Gets the error of a failed phase, before the phase raises it. Does not wait and does not raise."""

    def abort(self, reason: str) -> None:
        """Tells the other ranks that this rank will not finish work for which they may wait. Does not wait.

        Args:
            reason: The failure, in one line.
        """


class TrainingRank:
    """One rank of the training world.

    Attributes:
        host: The trainer's class, for parts that need its model; None if it offers no model.
        training_rank: This process's rank in the training world.
        training_size: Number of trainers.
        rl_safe: Our settings.
        megatron: The parallel sizes and offload settings.
        device: Device of the tensors.
        features: Features of the model that decide which collectives run; None to take them from ``megatron``.
        lifecycle: The phases that this rank has been through.
        parts: The parts, in the order in which they are called before each phase.
        outside_timeout: Longest wait of a collective outside of phases; None to keep the timeout of the last phase.
        bounds_collectives: Whether a phase sets the groups' timeouts, so that its deadline bounds its collectives.
        deadline: The deadline of the current phase.
    """

    def __init__(
        self,
        *,
        training_rank: int,
        training_size: int,
        rl_safe: RlSafeConfig,
        megatron: MegatronConfig,
        device: torch.device,
        host: Any = None,
        features: Features | None = None,
        outside_timeout: timedelta | None = None,
    ) -> None:
        """Stores this rank's place and settings. Touches no device and no network."""
        self.training_rank, self.training_size = training_rank, training_size
        self.rl_safe, self.megatron, self.device = rl_safe, megatron, device
        self.host, self.features, self.outside_timeout = host, features, outside_timeout
        self.bounds_collectives = True
        self.lifecycle = Lifecycle(role=Role.TRAINER, rank=training_rank)
        self.parts: tuple[Part, ...] = ()
        self.deadline = Deadline(0.0, 0.0)
        self._store: Store | None = None
        self._control: ControlPlane | None = None
        self._world: TrainingWorld | None = None

    @property
    def has_store(self) -> bool:
        """True if this rank is connected to the run's store."""
        return self._store is not None

    @property
    def store(self) -> Store:
        """The run's store.

        Raises:
            LifecycleError: If this rank is not connected to it yet.
        """
        return self._present(self._store)

    @store.setter
    def store(self, store: Store) -> None:
        self._store = store

    @property
    def has_control(self) -> bool:
        """True if this rank has taken its place among the trainers. It can then exchange messages with them."""
        return self._control is not None

    @property
    def control(self) -> ControlPlane:
        """This rank's place among the trainers.

        Raises:
            LifecycleError: If it has not joined the training world yet.
        """
        return self._present(self._control)

    @property
    def has_world(self) -> bool:
        """True if this rank has joined the training world."""
        return self._world is not None

    @property
    def world(self) -> TrainingWorld:
        """The training world.

        Raises:
            LifecycleError: If this rank has not joined it yet.
        """
        return self._present(self._world)

    @world.setter
    def world(self, world: TrainingWorld) -> None:
        self._world = world

    def _present(self, value: T | None) -> T:
        if value is None:
            raise LifecycleError(
                f"training rank {self.training_rank} has not joined the training world: call init_world() or "
                "carve_world() first"
            )
        return value

    def open_control(self, secret: bytes) -> None:
        """Takes this rank's place among the trainers, over the store. Not collective.

        Args:
            secret: The run's secret, 32 bytes.
        """
        self._control = ControlPlane(
            self.store,
            world=TRAINING_WORLD,
            rank=self.training_rank,
            members=trainer_ids(range(self.training_size)),
            secret=secret,
        )

    def timeout(self, phase: Phase) -> timedelta:
        """Returns the configured timeout of a phase."""
        return timedelta(seconds=getattr(self.rl_safe.timeouts, phase.value))

    def remaining(self) -> timedelta:
        """Returns the time left in the current phase, at least 0.1 s, because several waits share a deadline."""
        return self.deadline.remaining()

    def before(self, phase: Phase) -> None:
        """Lets each part prepare for a phase, or refuse it.

        Raises:
            RlSafeError: If a part refuses it.
        """
        for part in self.parts:
            part.before(phase)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Enters a phase; the body starts once every trainer has arrived. Collective over: the training world.

        Collectives of the body time out with the phase.

        Raises:
            RlSafeError: If a part refuses the phase.
            LifecycleError: If the transition table does not allow it now.
            PhaseTimeoutError: If some trainer does not arrive in time; names it.
        """
        self.before(phase)
        with self.lifecycle.enter(phase), self._telling(phase):
            self.meet(phase)
            try:
                with ExitStack() as watches:
                    for part in self.parts:
                        watches.enter_context(part.during(phase))
                    yield
            finally:
                if self.outside_timeout is not None:
                    set_group_timeouts(self.outside_timeout)

    @contextmanager
    def _telling(self, phase: Phase) -> Iterator[None]:
        """Tells the parts about an error of the body."""
        try:
            yield
        except Exception as error:
            for part in self.parts:
                part.failed(phase, error)
            raise

    def meet(self, phase: Phase) -> None:
        """Sets the deadline of a phase, and waits for all trainers. Collective over: the training world.

        Raises:
            PhaseTimeoutError: If some trainer does not arrive in time; names it.
        """
        self.deadline = Deadline.after(self.timeout(phase))
        self.control.barrier(phase, self.deadline)
        if self.bounds_collectives:
            set_group_timeouts(self.remaining())

    def abort(self, reason: str) -> None:
        """Tells the ranks that wait for this one that it has failed. Does not wait.

        Args:
            reason: The failure, in one line.
        """
        for part in self.parts:
            part.abort(reason)

    def together(self, phase: Phase, work: Callable[[], T], *, failure: Exception | None = None) -> T:
        """Does work on training rank 0 if all ranks are well. Every rank returns the work's value, or raises its error.

        Collective over: the training world, through the store, within the current phase's deadline.

        Args:
            phase: The current phase.
            work: Called on rank 0 only; its value must be fit for JSON.
            failure: This rank's failure. Every rank then raises, and the work is not done.

        Raises:
            RlSafeError: This rank's own failure, or the same kind of error as on the rank that failed.
            PhaseTimeoutError: On every rank, if some do not report in time; names them.
        """
        foreign = CheckpointError if phase in _ON_STORAGE else RunError
        gathering = self.control.gathering(f"together/{phase}", phase=phase)
        value: T = gathering.settle(self.deadline, failure=failure, decide=lambda reports: work(), foreign=foreign)
        return value

    def failed_ranks(self, phase: Phase, failure: Failure | None) -> dict[int, Failure]:
        """Tells the others this rank's failure, and returns all failures by training rank.

        Collective over: the training world, through the store, within the current phase's deadline.

        Args:
            phase: The current phase.
            failure: This rank's failure; None if it is well.

        Raises:
            PhaseTimeoutError: On every rank, if some do not report in time; names them.
        """
        report = None if failure is None else failure.as_json()
        gathering = self.control.gathering(f"failed_ranks/{phase}", phase=phase)
        reports = gathering.settle(self.deadline, report=report, decide=list)
        return {rank: Failure.from_json(report) for rank, report in enumerate(reports) if report is not None}
