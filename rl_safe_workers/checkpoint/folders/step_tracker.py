"""The tracker file: the step of the newest complete checkpoint, as verl and Megatron-LM write and read it.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import os
from pathlib import Path

from rl_safe_workers.checkpoint.folders.durable import temporary_path, write_durably
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_files import printable, read_foreign

TRACKER = "latest_checkpointed_iteration.txt"
_LIMIT_BYTES = 64


def check_tracker(root: Path, *, advice: str) -> None:
    """Refuses a tracker file that is not a regular file with a number in it: it is not ours to replace.

    Args:
        root: Directory of the checkpoints.
        advice: The alternative to moving the file away.

    Raises:
        CheckpointError: One line, with its name.
    """
    for path in (root / TRACKER, temporary_path(root / TRACKER)):
        if os.path.lexists(path) and not _is_number(path):
            raise CheckpointError(
                f"{printable(str(path))} is no file with the number of a step: it is left alone; move it away, or "
                f"{advice}"
            )


def read_tracker(root: Path) -> int | None:
    """Returns the step that the tracker file names; None if the file is missing or names no step."""
    try:
        text = read_foreign(root / TRACKER, limit_bytes=_LIMIT_BYTES).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def write_tracker(root: Path, step: int) -> None:
    """Writes the step of the newest complete checkpoint. Durable and atomic: a reader never finds part of a number.

    Raises:
        CheckpointError: If something that is not ours has its name.
        OSError: If it cannot be written.
    """
    check_tracker(root, advice="save elsewhere")
    temporary_path(root / TRACKER).unlink(missing_ok=True)
    write_durably(root / TRACKER, str(step))


def _is_number(path: Path) -> bool:
    """Returns True if a regular file, no link, holds a number or, after a crash, the beginning of one."""
    try:
        text = b"?" if path.is_symlink() else read_foreign(path, limit_bytes=_LIMIT_BYTES)
    except OSError:
        return False
    return not text.strip() or text.strip().isdigit()
