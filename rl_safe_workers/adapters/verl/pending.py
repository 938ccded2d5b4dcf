"""A save that goes on while verl trains: the trees of one checkpoint, and what verl does once they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from rl_safe_workers.checkpoint.saver import Saver
from rl_safe_workers.control.deadline import Deadline


class PendingSave:
    """The trees of one checkpoint on their way to storage.

    Args:
        engine: Whose checkpoint it is.
        step_folder: verl's folder of the step, which has those of all engines.
        savers: One for each tree, with its save begun.
        finalise: verl's own last part, which writes its manifest.
    """

    def __init__(self, engine: str, step_folder: Path, savers: Sequence[Saver], finalise: Callable[[], None]) -> None:
        self.engine, self.step_folder = engine, step_folder
        self._savers, self._finalise = list(savers), finalise

    def is_in_progress(self) -> bool:
        """Moves every tree on, without waiting; whether one is still being written. Not collective."""
        # Every one, not up to the first: each has to be moved on.
        still = [saver.poll() for saver in self._savers]
        return any(still)

    @property
    def has_failed(self) -> bool:
        """Whether a tree that is not in progress any more has failed, which `finish` raises."""
        return any(saver.in_flight for saver in self._savers)

    def finish(self, timeout: timedelta) -> None:
        """Waits until every tree is committed. Collective over: the training world, through the store.

        Raises:
            CheckpointError: On every rank, if one has failed.
            PhaseTimeoutError: Naming the ranks that have not written in time.
        """
        deadline = Deadline.after(timeout)
        for saver in self._savers:
            saver.finish(deadline.remaining())

    def finalise(self) -> None:
        """Does verl's last part."""
        self._finalise()

    def abandon(self, reason: str) -> None:
        """Gives it up and tells the others. Does not wait."""
        for saver in self._savers:
            saver.abandon(reason)
