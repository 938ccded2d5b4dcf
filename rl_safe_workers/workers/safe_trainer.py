"""A Megatron trainer that is safe beside vLLM: one rank of the training world, and the parts that guard it."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch

from rl_safe_workers.checkpoint.load.loader import CheckpointLoads
from rl_safe_workers.checkpoint.save.saver import CheckpointSaves
from rl_safe_workers.comms.teardown import abort_groups, destroy_groups
from rl_safe_workers.config import ABORT_S, MegatronConfig, RlSafeConfig
from rl_safe_workers.control.bounded import failure_of, within
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.errors import in_one_line
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.workers.communicators import Communicators, HostComms
from rl_safe_workers.workers.conversions import Conversions
from rl_safe_workers.workers.memory_watch import MemoryWatch, is_first_here
from rl_safe_workers.workers.offloader import Offloader
from rl_safe_workers.workers.weight_sync import WeightSync
from rl_safe_workers.workers.world_entry import WorldEntry
from rl_safe_workers.worlds.training_rank import Part, TrainingRank

logger = logging.getLogger(__name__)

_ABORT = timedelta(seconds=ABORT_S)
_JOINT_SHARE = 0.5
"""Share of the teardown's time for leaving the joint group."""


class SafeTrainer(TrainingRank):
    """One training rank with all its parts.

    The order of calls::

        entry.init_world, carve_world or adopt_world → comms.init_groups → comms.bootstrap
            → (the host builds its model) → weights.join → offloader, weights, saves, loads … → teardown

    Attributes:
        entry: How this rank comes into the training world.
        comms: Megatron's groups and their communicators.
        weights: Weight sync to rollout ranks.
        saves: Saves of checkpoints.
        loads: Loads of checkpoints and conversions.
        conversions: Conversions of HF weights to Megatron's shards and back.
        offloader: Offloads of the trainer's state during rollouts.
        memory: Watch over this process's memory. The host calls ``memory.step`` at the end of each step.
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
        host_comms: HostComms | None = None,
        releases_comms: bool = False,
        outside_timeout: timedelta | None = None,
    ) -> None:
        """Stores this rank's place and settings. Touches no device and no network.

        Args:
            training_rank: This process's rank in the training world.
            training_size: Number of trainers.
            rl_safe: Our settings.
            megatron: The parallel sizes and offload settings.
            device: Device of the tensors.
            host: The trainer's class, see `MegatronHost`; None if only groups and the exit are guarded.
            features: Features that decide which collectives the groups carry; None to take them from ``megatron``.
            host_comms: Collectives that a host framework adds to Megatron's; None for no additions.
            releases_comms: Whether an offload also frees the communicators' memory.
            outside_timeout: Longest wait of a collective outside of phases; None to keep the timeout of the last phase.
        """
        super().__init__(
            training_rank=training_rank,
            training_size=training_size,
            rl_safe=rl_safe,
            megatron=megatron,
            device=device,
            host=host,
            features=features,
            outside_timeout=outside_timeout,
        )
        self.comms = Communicators(self, host_comms or HostComms())
        self.entry = WorldEntry(self, world_options=self.comms.world_options)
        self.weights = WeightSync(self, self.entry)
        self.saves = CheckpointSaves(self)
        self.loads = CheckpointLoads(self)
        self.conversions = Conversions(self, self.saves)
        self.offloader = Offloader(self, self.comms, releases_comms=releases_comms)
        self.memory = MemoryWatch(f"training rank {training_rank}", device, first_here=is_first_here(training_rank))
        # A background save may need the bootstrap's result, so the saves come second. The offloader comes last, so that
        # it refuses a phase only after the other parts have prepared for it.
        self.parts = (self.comms, self.saves, self.offloader)
        self._outcome: dict[int, str] | None = None

    def add_part(self, part: Part) -> None:
        """Adds a host's own part, which each phase calls after all other parts."""
        self.parts = (*self.parts, part)

    def teardown(self, failure: str | None = None) -> dict[int, str]:
        """Exchanges outcomes, then destroys every group if all is well. Idempotent. Works after a partial set-up, too.

        Collective over: the training world. This rank aborts its groups if a rank failed, did not report in time, or
        does not arrive after its report. NCCL would wait for that rank before it destroys them. After an abort, the
        process can exit. If the ranks of a host's world have not met, this rank aborts its groups without an exchange.

        Args:
            failure: None if this rank is well, else its failure in one line.

        Returns:
            Failure by training rank; empty if every rank was well. If the first call has raised, later calls return
            the text of its error, under this rank.

        Raises:
            CommunicatorError: If the groups could not be destroyed within ``rl_safe.timeouts.teardown``.
            PhaseTimeoutError: If a rank that was well does not come in time; names it.
        """
        with self.lifecycle.enter(Phase.TEARDOWN):
            if self._outcome is not None:
                return self._outcome
            try:
                self._outcome = self._end(failure)
            except BaseException as error:
                self._outcome = {self.training_rank: in_one_line(error)}
                if self.has_world:
                    abort_groups(self.world, timeout=_ABORT)
                raise
            return self._outcome

    def _end(self, failure: str | None) -> dict[int, str]:
        """Does the work of the first `teardown`. If it raises, some groups may still exist."""
        if not (self.has_world and self.has_control):
            # The ranks have not met, so this rank cannot tell the others.
            self.weights.leave(failed=True)
            if self.has_world:
                abort_groups(self.world, timeout=_ABORT)
            return {} if failure is None else {self.training_rank: failure}
        failure = self._finish_everything() if failure is None else self._give_up_everything(failure)
        self.deadline = Deadline.after(self.timeout(Phase.TEARDOWN))
        failure = self._leave_joint_group(failure)
        failed = self.control.exchange_outcomes(failure, phase=Phase.TEARDOWN, deadline=self.deadline)
        if failed:
            # Log no warning and no names: a failed rank may only have waited. The verdict comes later.
            logger.info("teardown: groups are aborted, because not every rank is well")
            abort_groups(self.world, timeout=_ABORT)
            return failed
        self.control.barrier(Phase.TEARDOWN, self.deadline)
        destroy_groups(self.world, timeout=self.remaining())
        # The owner of the store stays until every other trainer has left its groups.
        self.control.sign_off(Phase.TEARDOWN, self.deadline)
        return {}

    def _finish_everything(self) -> str | None:
        """Lets the parts finish work that must not overlap the teardown; returns the failure, or None."""
        try:
            self.before(Phase.TEARDOWN)
        except Exception as error:  # the other ranks wait for this rank's outcome
            text = in_one_line(error)
            logger.warning("teardown: %s", text)
            return text
        return None

    def _leave_joint_group(self, failure: str | None) -> str | None:
        """Leaves the joint group; returns the failure, or None.

        After a failure it aborts the group. Otherwise NCCL waits for the rollout ranks, for at most `_JOINT_SHARE` of
        the remaining time.
        """
        if failure is not None:
            self.weights.leave(failed=True)
            return failure
        group = self.weights.detach()
        if group is None:
            return None
        patience = _JOINT_SHARE * self.remaining()
        left = failure_of(lambda: within(group.close, patience, what="leaving the joint group"))
        return None if left is None else in_one_line(left)

    def _give_up_everything(self, failure: str) -> str:
        """Lets the parts tell waiting ranks that this rank has failed; returns the failure."""
        try:
            self.abort(failure)
        except Exception as error:  # the other ranks wait for this rank's outcome
            logger.warning("teardown: giving up unfinished work: %s", in_one_line(error))
        return failure
