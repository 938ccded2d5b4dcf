"""A trainer's part in the verdict under a host framework: it answers questions, and notes its phase and its failure."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_safe_workers import env
from rl_safe_workers.adapters.job_inquiry import CALL_FRAME
from rl_safe_workers.diagnostics.answering import answer_when_asked, leave_failure, note_phase
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.reaping.processes import make_private
from rl_safe_workers.worlds.training_rank import Part

logger = logging.getLogger(__name__)

_folder: Path | None = None
"""The folder in which this process leaves its answers; None if this process cannot be asked."""


def listen() -> None:
    """Lets the job's driver ask this trainer where it is. Idempotent. Call it before a process group exists.

    It does nothing if our entry did not start the job, or if the job's folder cannot be made on this machine.
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


def listen_in(folder: Path) -> None:
    """Sets the folder in which this trainer answers. It is for jobs without a driver that names one for `listen`."""
    global _folder
    _folder = folder


def leave_early(error: Exception, phase: str) -> None:
    """Writes down an error that this trainer raised before a training world existed; see `RankNotes.failed`."""
    rank = env.global_rank()
    if _folder is not None and rank is not None:
        leave_failure(_folder, error, trainer_id(rank), phase)


class RankNotes(Part):
    """Writes down this rank's phase and its failure, so that both can be read after the rank has ended."""

    def before(self, phase: Phase) -> None:
        """Notes that this rank enters a phase."""
        self.note(phase)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Notes the end of the phase. After a failure the note of the phase stays."""
        yield
        self.note(None)

    def note(self, phase: Phase | None) -> None:
        """Notes a phase; None notes that this rank is outside of phases."""
        if _folder is not None:
            note_phase(_folder, trainer_id(self.rank.training_rank), phase)

    def failed(self, phase: str, error: Exception) -> None:
        """Writes down a failure of this rank, also one outside of phases."""
        if _folder is not None:
            leave_failure(_folder, error, trainer_id(self.rank.training_rank), phase)
