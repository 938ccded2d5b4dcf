"""A trainer's side of the verdict under a host framework: it answers the driver, and leaves what it has failed with."""

from __future__ import annotations

import logging
from pathlib import Path

from rl_safe_workers import env
from rl_safe_workers.adapters.job_inquiry import CALL_FRAME
from rl_safe_workers.diagnostics.answering import answer_when_asked, leave_failure
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.reaping.processes import make_private
from rl_safe_workers.worlds.training_rank import Part

logger = logging.getLogger(__name__)

_folder: Path | None = None
"""Where this process answers; None: nobody asks."""


def listen() -> None:
    """Lets the job's driver find out where this trainer is. Idempotent. Call it before there is a process group.

    It does nothing where the job was not started by our entry, or where its folder cannot be made on this machine.
    """
    global _folder
    wanted, rank = env.wanted_hang_dir(), env.global_rank()
    if _folder is not None or wanted is None or rank is None:
        return
    try:
        make_private(wanted)
        env.record_collectives(wanted)
        answer_when_asked(wanted, trainer_id(rank), CALL_FRAME)
    except OSError as error:
        logger.warning("training rank %d cannot be asked where it is: %s: %s", rank, wanted, error)
        return
    _folder = wanted


class FailureNotes(Part):
    """Leaves what a phase of this rank has failed with for the driver, which may hear of another rank first."""

    def failed(self, phase: Phase, error: Exception) -> None:
        """As `Part.failed`."""
        if _folder is not None:
            leave_failure(_folder, error, trainer_id(self.rank.training_rank), phase)
