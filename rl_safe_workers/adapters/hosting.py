"""A trainer process of a host framework, whose default group and calls are the host's. All adapters share it."""

from __future__ import annotations

from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from rl_safe_workers.config import MegatronConfig, RlSafeConfig
from rl_safe_workers.errors import CheckpointError, LifecycleError, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.workers.communicators import HostComms
from rl_safe_workers.workers.safe_trainer import SafeTrainer
from rl_safe_workers.worlds.training_world import device_of_world

_HEARD = timedelta(seconds=5)
"""How long a rank that has failed alone waits for the others to hear of it."""


class HostedTrainer:
    """A host's trainer process. It holds a `SafeTrainer`, once the host has made the default group."""

    _trainer: SafeTrainer | None = None

    @property
    def has_world(self) -> bool:
        """True if the default group exists and is the training world."""
        return self._trainer is not None and self._trainer.has_world

    @property
    def trainer(self) -> SafeTrainer:
        """This process among the trainers.

        Raises:
            LifecycleError: If `take_world` has not run.
        """
        if self._trainer is None:
            raise LifecycleError("there is no training world yet: the host has not made its default group")
        return self._trainer

    def take_world(
        self, rl_safe: RlSafeConfig, *, comms: HostComms, outside_timeout: timedelta, releases_comms: bool = False
    ) -> None:
        """Takes the host's default group, which holds trainers alone, as the training world.

        Collective over: the host's default group, through its store.

        Args:
            rl_safe: Our settings.
            comms: What the host adds to Megatron's communication.
            outside_timeout: Longest wait of one collective outside of phases.
            releases_comms: Whether the communicators' memory is given to the rollout.

        Raises:
            PhaseTimeoutError: If a rank does not come within the timeout of phase ``world``; names it.
        """
        self._trainer = SafeTrainer(
            training_rank=dist.get_rank(),
            training_size=dist.get_world_size(),
            rl_safe=rl_safe,
            megatron=MegatronConfig(),
            device=device_of_world(),
            host_comms=comms,
            releases_comms=releases_comms,
            outside_timeout=outside_timeout,
        )
        self._trainer.entry.adopt_world()

    def fail(self, phase: Phase, error: Exception) -> NoReturn:
        """Tells the others of a failure of this rank alone, which has an agreement with them ahead; raises it.

        Raises:
            CheckpointError: If the others have not heard of it in a few seconds.
        """
        trainer = self.trainer
        trainer.deadline = trainer.deadline.at_most(_HEARD)
        try:
            self.tell_failure(error)
            trainer.together(phase, lambda: None, failure=error)
        except PhaseTimeoutError:
            raise CheckpointError(f"training rank {trainer.training_rank}: {type(error).__name__}: {error}") from error
        raise AssertionError("an agreement with a failure raises")

    def tell_failure(self, error: Exception) -> None:
        """Tells those who wait for this rank before the phase's next agreement. Adapters override it; may raise.

        Args:
            error: What this rank alone has failed with.
        """
