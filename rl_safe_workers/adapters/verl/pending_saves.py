"""Saves that go on while verl trains: the trees of one checkpoint each, and what verl does once they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from rl_safe_workers.adapters.verl.tracker import StepTracker
from rl_safe_workers.checkpoint.save.saver import Saver
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.worlds.training_rank import Part, TrainingRank

_FINISHES_SAVES = frozenset({Phase.LOAD, Phase.TEARDOWN})
"""Phases that begin by finishing every save in the background."""


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
        """True if a tree that is not in progress any more has failed, which `finish` raises."""
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


class PendingSaves(Part):
    """The saves in the background of all engines of a process."""

    def __init__(self, rank: TrainingRank, tracker: StepTracker) -> None:
        """Follows no save yet.

        Args:
            rank: This rank.
            tracker: Names a step once every engine has saved it.
        """
        super().__init__(rank)
        self._tracker = tracker
        self._pending: list[PendingSave] = []

    def __len__(self) -> int:
        return len(self._pending)

    def before(self, phase: Phase) -> None:
        """Finishes saves in the background before a phase that they must not reach into; else moves them on."""
        if phase in _FINISHES_SAVES:
            self.finish()
        else:
            self.poll()

    def abort(self, reason: str) -> None:
        """Gives up saves in the background, so that the others need not wait for this rank."""
        pending, self._pending = self._pending, []
        for save in pending:
            save.abandon(reason)

    def follow(self, save: PendingSave) -> None:
        """Sees to the end of a save in the background."""
        self._pending.append(save)

    def poll(self) -> None:
        """Finalises saves in the background once all of them are written. Not collective; does not wait."""
        still = [save.is_in_progress() for save in self._pending]
        # A failure is raised by `finish`, on every rank.
        if not any(still) and not any(save.has_failed for save in self._pending):
            self._finalise()

    def finish_before(self, engine: str, step_folder: Path) -> None:
        """Finishes saves in the background before an engine's next; those of the same step by others go on.

        Raises:
            CheckpointError: As `finish`.
            PhaseTimeoutError: As `finish`.
        """
        if any(save.engine == engine or save.step_folder != step_folder for save in self._pending):
            self.finish()

    def finish(self) -> None:
        """Waits for saves in the background and finalises them. Collective over: the training world, by the store.

        Raises:
            CheckpointError: On every rank, if one has failed.
            PhaseTimeoutError: Naming the ranks that have not written in time.
        """
        try:
            for save in self._pending:
                save.finish(self.rank.timeout(Phase.SAVE))
            self._finalise()
        finally:
            self._pending = []

    def _finalise(self) -> None:
        pending, self._pending = self._pending, []
        for save in pending:
            save.finalise()
        self._tracker.name(writes=self.rank.training_rank == 0)
