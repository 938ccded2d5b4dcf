"""Follows saves that run while verl trains. Once all trees of a checkpoint are written, does verl's last steps."""

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
"""Phases before which every save in the background is finished."""


class PendingSave:
    """A save of one checkpoint, whose trees are being written.

    Args:
        engine: The engine that the checkpoint belongs to.
        step_folder: verl's folder of the step, which holds the folders of all engines.
        savers: One saver for each tree, whose save has begun.
        finalise: Does the last part of verl's save, which writes verl's manifest.
    """

    def __init__(self, engine: str, step_folder: Path, savers: Sequence[Saver], finalise: Callable[[], None]) -> None:
        self.engine, self.step_folder = engine, step_folder
        self._savers, self._finalise = list(savers), finalise

    def is_in_progress(self) -> bool:
        """Polls every tree; returns True if one is still being written. Does not wait. Not collective."""
        # Poll every saver, not only up to the first busy one: each advances only when it is polled.
        still = [saver.poll() for saver in self._savers]
        return any(still)

    @property
    def has_failed(self) -> bool:
        """True if the save of a tree has failed. Valid once no tree is in progress; `finish` raises the failure."""
        return any(saver.in_flight for saver in self._savers)

    def finish(self, timeout: timedelta) -> None:
        """Waits until every tree is committed. Collective over: the training world, through the store.

        Raises:
            CheckpointError: On every rank, if a rank has failed.
            PhaseTimeoutError: If ranks have not written in time; names them.
        """
        deadline = Deadline.after(timeout)
        for saver in self._savers:
            saver.finish(deadline.remaining())

    def finalise(self) -> None:
        """Does the last part of verl's save."""
        self._finalise()

    def abandon(self, reason: str) -> None:
        """Abandons the save and tells the other ranks. Does not wait."""
        for saver in self._savers:
            saver.abandon(reason)


class PendingSaves(Part):
    """The saves in the background of all engines of a process."""

    def __init__(self, rank: TrainingRank, tracker: StepTracker) -> None:
        """Starts without a save.

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
        """Finishes saves in the background before a phase that they must not overlap; else only polls them."""
        if phase in _FINISHES_SAVES:
            self.finish()
        else:
            self.poll()

    def abort(self, reason: str) -> None:
        """Abandons saves in the background, so that the other ranks do not wait for this one."""
        pending, self._pending = self._pending, []
        for save in pending:
            save.abandon(reason)

    def follow(self, save: PendingSave) -> None:
        """Takes over a save that has begun in the background, to finalise it later."""
        self._pending.append(save)

    def poll(self) -> None:
        """Finalises saves in the background once all of them are written. Not collective; does not wait."""
        still = [save.is_in_progress() for save in self._pending]
        # `finish` raises a failure, on every rank.
        if not any(still) and not any(save.has_failed for save in self._pending):
            self._finalise()

    def finish_before(self, engine: str, step_folder: Path) -> None:
        """Finishes saves in the background before an engine's next save. Other engines' saves of that step may go on.

        Raises:
            CheckpointError: As `finish`.
            PhaseTimeoutError: As `finish`.
        """
        if any(save.engine == engine or save.step_folder != step_folder for save in self._pending):
            self.finish()

    def finish(self) -> None:
        """Waits for saves in the background and finalises them. Collective over: the training world, by the store.

        Raises:
            CheckpointError: On every rank, if a rank has failed.
            PhaseTimeoutError: If ranks have not written in time; names them.
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
