"""Where a run starts from."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from rl_safe_workers.checkpoint.manifest import (
    Manifest,
    check_fingerprint,
    find_checkpoints,
    model_fingerprint,
    read_manifest,
)
from rl_safe_workers.config import ResumeMode, RunConfig
from rl_safe_workers.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A checkpoint to go on from."""

    path: Path
    manifest: Manifest


def find_resume_point(config: RunConfig) -> ResumePoint | None:
    """Finds the checkpoint that the configuration asks to resume from; None to start from the HF weights.

    Raises:
        CheckpointError: If the named checkpoint is not complete, or all that there are are damaged.
        CheckpointMismatchError: If it belongs to another model.
    """
    trainer = config.trainer
    if trainer.resume_mode is ResumeMode.disable:
        return None
    if trainer.resume_mode is ResumeMode.resume_path:
        assert trainer.resume_from_path is not None, "checked with the other contradictions"
        path = Path(trainer.resume_from_path)
        point = ResumePoint(path=path, manifest=read_manifest(path))
    else:
        assert trainer.default_local_dir is not None, "filled by load_recipe"
        found = find_checkpoints(Path(trainer.default_local_dir))
        for error in found.damaged:
            logger.warning("passed over: %s", error)
        if not found.complete and found.damaged:
            raise CheckpointError(
                f"trainer.resume_mode=auto: every checkpoint in {trainer.default_local_dir} is damaged; "
                "to start over set trainer.resume_mode=disable"
            )
        if not found.complete:
            return None
        path, manifest = found.complete[0]
        point = ResumePoint(path=path, manifest=manifest)
    if Path(config.model.path).is_dir():
        check_resume_point(point, config)
    return point


def newest_since(config: RunConfig, started_at: float) -> ResumePoint | None:
    """Returns the newest complete checkpoint in ``trainer.default_local_dir`` that was saved since; None if none was.

    Args:
        config: Of the run.
        started_at: Unix time; what is older is another run's.
    """
    assert config.trainer.default_local_dir is not None, "filled by load_recipe"
    found = find_checkpoints(Path(config.trainer.default_local_dir))
    since = [(path, manifest) for path, manifest in found.complete if manifest.saved_at >= started_at]
    return ResumePoint(path=since[0][0], manifest=since[0][1]) if since else None


def check_resume_point(point: ResumePoint, config: RunConfig) -> None:
    """Refuses a checkpoint of another model. Needs the model; a seeded one may have to be made first.

    Raises:
        CheckpointMismatchError: Naming both sides.
    """
    check_fingerprint(point.manifest, path=point.path, fingerprint=model_fingerprint(config.model.path))
