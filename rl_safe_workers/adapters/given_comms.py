"""Gives the memory of the trainers' communicators to the rollout engines on the same GPUs while the engines are awake.

A host's step has this order. The trainers do not communicate from the second line until the communicators are taken
back::

    weight sync       the bridge gathers weights, parameters go to the host
                      given away here, before an engine allocates its KV cache
    generation
    sleep             the engines free their memory
                      taken back here, before parameters come to the device
    log-probabilities, update
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist

from rl_safe_workers.comms.nccl_suspend import can_suspend
from rl_safe_workers.comms.releasable import register_backend
from rl_safe_workers.comms.release import releasable_groups
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.workers.offloader import USES_STATE
from rl_safe_workers.workers.safe_trainer import SafeTrainer
from rl_safe_workers.worlds.training_rank import Part

logger = logging.getLogger(__name__)


def world_backend(*, is_cpu: bool, sends_unbatched: bool) -> str | None:
    """Returns the default group's backend for communicators that can give their memory away; None: the host's own.

    The host's own backend is enough if NCCL can suspend communicators. Every later group, Megatron's or the host's,
    inherits the backend.

    Args:
        is_cpu: Whether the trainers are on CPUs.
        sends_unbatched: Whether some group may carry unbatched sends.
    """
    if is_cpu:
        return register_backend("gloo")
    if can_suspend(torch.device("cuda"), sends_unbatched=sends_unbatched):
        return None
    return register_backend("nccl")


class GivenComms(Part):
    """Gives the memory away and takes it back, on one training rank.

    Attributes:
        are_away: Whether the memory is given away.
        freed_bytes: Bytes of device memory that were given away last.
        seconds: Seconds spent on giving and taking back since the metrics were last read.
    """

    def __init__(self, rank: SafeTrainer, *, taken_back_by: str, remedy: str) -> None:
        """Starts while the communicators hold their memory.

        Args:
            rank: This training rank.
            taken_back_by: The call that takes the memory back. The error of a caller that uses a group too early names
                it.
            remedy: Advice for the warning, if the groups cannot give memory away.
        """
        super().__init__(rank)
        self._offloader, self._taken_back_by, self._remedy = rank.offloader, taken_back_by, remedy
        self.are_away, self.freed_bytes, self.seconds = False, 0, 0.0

    def check(self) -> None:
        """Turns `give` off, with a warning, if these groups cannot give their memory away. Not collective."""
        offloader = self._offloader
        if offloader.releases_comms and not offloader.suspends_comms and not releasable_groups():
            offloader.releases_comms = False
            logger.warning(
                "training rank %d: communicators keep their memory, whatever release_comms says: the default group's "
                "backend is %s, and NCCL does not suspend its communicators; %s",
                self.rank.training_rank,
                dist.get_backend_config(),
                self._remedy,
            )

    def give(self, phase: Phase) -> None:
        """Gives the memory away. Collective over: the training world. Idempotent.

        Args:
            phase: The phase that this is part of.

        Raises:
            CommunicatorError: On every rank, if a rank failed; names it.
            PhaseTimeoutError: If a rank does not come in time; names it.
        """
        if self.are_away or not self._offloader.releases_comms:
            return
        started_s = time.monotonic()
        self.freed_bytes = self._offloader.release_comms(phase=phase, missing_call=self._taken_back_by)
        # `release_comms` sets `releases_comms` to False if NCCL cannot suspend communicators.
        self.are_away = self._offloader.releases_comms
        self.seconds += time.monotonic() - started_s

    def take_back(self) -> None:
        """Takes the memory back in the current phase. Outside of phases, it enters phase ``bootstrap``.

        Collective over: the training world. Idempotent.

        Raises:
            CommunicatorError: As `give`.
            PhaseTimeoutError: As `give`.
        """
        if not self.are_away:
            return
        started_s = time.monotonic()
        phase = self.rank.lifecycle.current
        with self.rank.phase(Phase.BOOTSTRAP) if phase is None else nullcontext():
            self._offloader.rebuild_comms(phase=phase or Phase.BOOTSTRAP)
        self.are_away = False
        self.seconds += time.monotonic() - started_s

    def before(self, phase: Phase) -> None:
        """Takes the memory back before a phase that uses the model state, because such a phase has collectives."""
        if phase in USES_STATE:
            self.take_back()
