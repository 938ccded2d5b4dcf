"""What the mixins share: the worker's place in its worlds, its lifecycle, and phases with deadlines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import Store

from rl_safe_workers.comms.groups import set_group_timeouts
from rl_safe_workers.config import MegatronConfig, RlSafeConfig
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import CheckpointError, Failure, LifecycleError, RunError
from rl_safe_workers.lifecycle import Lifecycle, Phase
from rl_safe_workers.ranks import Role
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.worlds.training_world import TrainingWorld

T = TypeVar("T")

_ON_STORAGE = (Phase.SAVE, Phase.LOAD, Phase.CONVERT)
"""Phases in which what fails without an error of ours is a checkpoint, or the storage that it is on."""


class MegatronHost(Protocol):
    """What the mixins need of the class they are mixed over: the model, and nothing about how it was built."""

    device: torch.device
    chunks: list[Any]
    """Model chunks of this rank, wrapped in Megatron's DistributedDataParallel."""
    optimizer: Any
    """Megatron's DistributedOptimizer, or a chain of them."""

    def export_hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every HF weight, whole, on every rank, in the same order. Collective at each item."""
        ...


class SafeWorker:
    """State that every mixin uses. `setup_worker` must run first."""

    rl_safe: RlSafeConfig
    megatron: MegatronConfig
    device: torch.device
    features: Features | None = None
    """What the host knows of its model that decides about collectives; None: taken from ``megatron``."""
    releases_comms: bool = False
    """Whether an offload gives up the communicators' memory, too."""
    training_rank: int
    training_size: int
    store: Store
    world: TrainingWorld
    control: ControlPlane
    """This rank's place in the training world."""
    _lifecycle: Lifecycle | None = None
    _deadline = Deadline(0.0, 0.0)

    def setup_worker(
        self,
        *,
        training_rank: int,
        training_size: int,
        rl_safe: RlSafeConfig,
        megatron: MegatronConfig,
        device: torch.device,
        features: Features | None = None,
    ) -> None:
        """Records this worker's place and configuration. Touches no device and no network."""
        self.features = features
        self.training_rank, self.training_size = training_rank, training_size
        self.rl_safe, self.megatron, self.device = rl_safe, megatron, device
        self._lifecycle = Lifecycle(role=Role.TRAINER, rank=training_rank)

    @property
    def lifecycle(self) -> Lifecycle:
        """The phases of this worker.

        Raises:
            LifecycleError: If `setup_worker` has not run.
        """
        if self._lifecycle is None:
            raise LifecycleError(f"{type(self).__name__} has not been set up: call setup_worker() before anything else")
        return self._lifecycle

    def timeout(self, phase: Phase) -> timedelta:
        """The configured timeout of a phase."""
        return timedelta(seconds=getattr(self.rl_safe.timeouts, phase.value))

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Enters a phase; the body starts once every trainer has arrived. Collective over: the training world.

        Collectives of the body time out with the phase.

        Raises:
            LifecycleError: If the transition table does not allow the phase now.
            PhaseTimeoutError: If some trainer does not arrive in time; names it.
        """
        self.check_phase(phase)
        with self.lifecycle.enter(phase):
            self._deadline = Deadline.after(self.timeout(phase))
            self.control.barrier(phase, self._deadline)
            set_group_timeouts(self.remaining())
            yield

    def check_phase(self, phase: Phase) -> None:
        """Refuses a phase before it is entered. The mixins add their own conditions and call on.

        Raises:
            LifecycleError: If the worker is not ready for it.
        """

    def give_up(self, reason: str) -> None:
        """Tells the others that this rank will not finish what they may wait for. Does not wait.

        The mixins add their own and call on.

        Args:
            reason: What has failed, in one line.
        """

    def remaining(self) -> timedelta:
        """Time left in the current phase, at least a tenth of a second: several waits share one deadline."""
        return self._deadline.remaining()

    def together(self, phase: Phase, work: Callable[[], T], *, failure: Exception | None = None) -> T:
        """Does something on training rank 0 once all are well; every rank returns its value, or raises if it did.

        Collective over: the training world, through the store, within the current phase's deadline.

        Args:
            phase: The current phase.
            work: Called on rank 0 alone; its value must be fit for JSON.
            failure: What this rank has failed with; it then fails on every rank, and nothing is done.

        Raises:
            RlSafeError: This rank's own failure, or the same kind of error with that of others.
        """
        foreign = CheckpointError if phase in _ON_STORAGE else RunError
        value: T = self.control.decide(
            f"together/{phase}", phase=phase, deadline=self._deadline, failure=failure,
            decide=lambda reports: work(), foreign=foreign,
        )  # fmt: skip
        return value

    def failed_ranks(self, phase: Phase, failure: Failure | None) -> dict[int, Failure]:
        """Tells the others what this rank has failed with, and returns everyone's failures by training rank.

        Collective over: the training world, through the store, within the current phase's deadline.
        """
        reports = self.control.decide(
            f"failed_ranks/{phase}", phase=phase, deadline=self._deadline, report=failure, decide=list
        )
        return {rank: Failure.from_json(report) for rank, report in enumerate(reports) if report is not None}
