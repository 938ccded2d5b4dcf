"""A directory under its final name only when it is complete.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rl_safe_workers.checkpoint.manifest import INCOMPLETE, REPLACED, fsync
from rl_safe_workers.errors import CheckpointError


def pending_path(final: Path) -> Path:
    """Where a directory is made before it has its final name, in the same folder."""
    return final.with_name(final.name + INCOMPLETE)


def make_parent(final: Path) -> None:
    """Makes the folder that a directory will be in.

    Raises:
        CheckpointError: If it cannot be made.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {final}: {error}; choose a writable place") from error


def start_pending(final: Path) -> Path:
    """Makes an empty directory to fill, in the place of one that an interrupted run has left.

    Raises:
        CheckpointError: If it cannot be made.
    """
    make_parent(final)
    pending = pending_path(final)
    try:
        if pending.exists():
            shutil.rmtree(pending)
        pending.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot make {pending}: {error}; choose a writable place") from error
    return pending


def publish(pending: Path, final: Path) -> None:
    """Makes everything in a directory durable and gives it its final name; what had that name is removed after.

    Raises:
        OSError: If something cannot be made durable or renamed; what had the name then has it still, or is found
            beside it under the name with ``.replaced.incomplete`` if the machine stopped between the two renames.
    """
    for path in sorted(pending.rglob("*")):
        fsync(path)
    fsync(pending)
    replaced = final.with_name(final.name + REPLACED)
    if replaced.exists():
        shutil.rmtree(replaced)
    if final.exists():
        final.rename(replaced)
    try:
        pending.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    fsync(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


@contextmanager
def removed_on_failure(pending: Path, *, what: str) -> Iterator[None]:
    """Removes a directory in progress when the body fails, and turns the system's refusals into ours.

    Args:
        pending: The directory.
        what: What is being written, for the error, e.g. ``"the conversion"``.

    Raises:
        CheckpointError: In the place of an OSError: a full disk, a missing permission, a vanished directory.
    """
    try:
        yield
    except BaseException as error:
        # What cannot be removed is an incomplete directory by its name, and the next run removes it.
        with suppress(OSError):
            shutil.rmtree(pending)
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write {what} at {pending}: {error}; free or change the place") from error
        raise
