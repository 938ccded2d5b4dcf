"""Finds and checks the checkpoint that a run resumes from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_safe_workers.checkpoint.folders.manifest import (
    Manifest,
    check_fingerprint,
    find_checkpoints,
    model_fingerprint,
    read_manifest,
    step_entries,
)
from rl_safe_workers.checkpoint.folders.retention import check_places, warn_once
from rl_safe_workers.config import ResumeMode, TrainerConfig
from rl_safe_workers.driver.inputs.data import check_position
from rl_safe_workers.errors import CheckpointError, ConfigError
from rl_safe_workers.foreign_files import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A checkpoint to resume from."""

    path: Path
    manifest: Manifest


def find_resume_point(trainer: TrainerConfig, model_path: Path) -> ResumePoint | None:
    """Finds the checkpoint that a run is to resume from; None to start from the HF weights.

    Args:
        trainer: The run's node ``trainer``.
        model_path: The run's model. If the model exists already, a checkpoint of another model is refused.

    Raises:
        CheckpointError: If the named checkpoint is not complete, or if there are checkpoints and all are damaged.
        CheckpointMismatchError: If the checkpoint belongs to another model.
    """
    if trainer.resume_mode is ResumeMode.disable:
        return None
    if trainer.resume_mode is ResumeMode.resume_path:
        assert trainer.resume_from_path is not None, "checked with the other contradictions"
        path = Path(trainer.resume_from_path)
        point = ResumePoint(path=path, manifest=read_manifest(path))
    else:
        assert trainer.default_local_dir is not None, "filled by load_recipe"
        newest = _newest_sound(Path(trainer.default_local_dir))
        if newest is None:
            return None
        point = newest
    if model_path.is_dir():
        check_resume_point(point, model_path)
    return point


def _newest_sound(root: Path) -> ResumePoint | None:
    """Returns the newest checkpoint that a run can resume from; None if there is no checkpoint.

    Raises:
        CheckpointError: If there are checkpoints and all are damaged.
    """
    found, points = find_checkpoints(root), list[ResumePoint]()
    damaged = list(found.damaged)
    for path, manifest in found.complete:
        point = ResumePoint(path=path, manifest=manifest)
        try:
            data_position(point)
        except CheckpointError as error:
            damaged.append(error)
        else:
            points.append(point)
    for one in damaged:
        warn_once(f"passed over: {one}")
    if damaged and not points:
        raise CheckpointError(
            f"trainer.resume_mode=auto: every checkpoint in {root} is damaged; "
            "to start over set trainer.resume_mode=disable"
        )
    return points[0] if points else None


def data_position(point: ResumePoint) -> Mapping[str, int]:
    """Returns the position in the data at a checkpoint, for `PromptLoader.load_state_dict`.

    Raises:
        CheckpointError: If the checkpoint has no position, or a malformed one.
    """
    position: Any = point.manifest.driver_state.get("data")
    if (wrong := check_position(position)) is not None:
        where = printable(str(point.path))
        raise CheckpointError(f"{where} has no usable data position ({wrong}); use another checkpoint")
    found: Mapping[str, int] = position
    return found


def newest_since(root: Path, serial: int) -> ResumePoint | None:
    """Returns the newest complete checkpoint in ``trainer.default_local_dir`` that this run saved; None if none.

    Args:
        root: The run's ``trainer.default_local_dir``.
        serial: `last_serial` of that directory at the start of the run. Checkpoints up to it are from other runs.
    """
    found = find_checkpoints(root)
    since = [(path, manifest) for path, manifest in found.complete if manifest.serial > serial]
    return ResumePoint(path=since[0][0], manifest=since[0][1]) if since else None


def check_save_places(trainer: TrainerConfig, resume: ResumePoint | None) -> None:
    """Refuses a run if a save would have to overwrite files that are not ours. Writes nothing.

    Args:
        trainer: The run's configuration node ``trainer``.
        resume: The checkpoint that it starts from; None for a start from the HF weights.

    Raises:
        ConfigError: If a save would meet such a file. The message is one line and names it.
    """
    assert trainer.default_local_dir is not None, "filled by load_recipe"
    root = Path(trainer.default_local_dir)
    if trainer.save_freq < 1 or not os.path.lexists(root):
        return
    if not root.is_dir():
        raise ConfigError(f"trainer.default_local_dir={root} is not a directory: choose another place")
    first, last = (0 if resume is None else resume.manifest.step) + 1, trainer.total_training_steps
    there = {int(match[1]) for _, match in step_entries(root)}
    saved = [step for step in there if first <= step <= last and (step % trainer.save_freq == 0 or step == last)]
    try:
        # The last step is always saved. Checking it also checks the tracker file.
        for step in sorted({*saved, last}):
            check_places(root, step)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def check_resume_point(point: ResumePoint, model_path: Path) -> None:
    """Refuses a checkpoint of another model. The model must exist; a seeded model may have to be made first.

    Raises:
        CheckpointMismatchError: If the checkpoint is of another model. The message names both.
    """
    check_fingerprint(point.manifest, path=point.path, fingerprint=model_fingerprint(model_path))
