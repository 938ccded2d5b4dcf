"""Writes verl's tracker file, which names the step to resume from (checkpoint_manager.py:259). Imports no verl."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rl_safe_workers.checkpoint.folders.step_tracker import write_tracker


class StepTracker:
    """Names a step in the tracker file once every engine of the process has saved it.

    If the actor saves synchronously, verl's driver names a step after all roles have saved it. Else verl leaves this to
    the workers (trainer_base.py:1011). In stock verl, each role's manager then names the step after its own save
    (megatron_checkpoint_manager.py:1136), even if the other roles' saves have failed.
    """

    def __init__(self) -> None:
        self._background: dict[str, bool] = {}
        self._followers: set[str] = set()
        self._steps: dict[Path, int] = {}
        self._saved: dict[Path, dict[str, Callable[[], None]]] = {}

    def add(self, engine: str, *, background: bool, is_critic: bool) -> None:
        """Adds an engine that saves.

        Args:
            engine: The engine's name.
            background: Whether its saves run in the background while verl trains.
            is_critic: Whether it is a critic. verl's driver ignores critics when it decides who names the step.
        """
        self._background[engine] = background
        if is_critic:
            self._followers.add(engine)

    @property
    def is_ours(self) -> bool:
        """True if verl's driver leaves the naming of steps to the workers."""
        leaders = [background for engine, background in self._background.items() if engine not in self._followers]
        return any(self._background.values()) and all(leaders)

    def begin(self, engine: str, step_folder: Path, step: int) -> None:
        """Notes that an engine begins to save a step, perhaps for the second time."""
        if self.is_ours:
            self._steps[step_folder] = step
            self._saved.setdefault(step_folder, {}).pop(engine, None)

    def saved(self, engine: str, step_folder: Path, then: Callable[[], None]) -> None:
        """Notes that an engine's save of a step is complete.

        Args:
            engine: The engine's name.
            step_folder: verl's folder of the step.
            then: Is called once every engine has saved the step. The rank that writes the file has then named the step.
        """
        self._saved[step_folder][engine] = then

    def name(self, *, writes: bool) -> None:
        """Names the steps that every engine has saved, the oldest first. Not collective.

        Args:
            writes: Whether this is the rank that writes the file.
        """
        for step_folder in [folder for folder, saved in self._saved.items() if saved.keys() == self._background.keys()]:
            if writes:
                write_tracker(step_folder.parent, self._steps[step_folder])
            del self._steps[step_folder]
            for then in self._saved.pop(step_folder).values():
                then()
