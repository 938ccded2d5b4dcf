"""A directory under its final name only when it is complete.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rl_safe_workers.checkpoint.folders.durable import fsync
from rl_safe_workers.checkpoint.folders.ownership import INCOMPLETE, REPLACED, check_ours, claim, mark, release, remove
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError
from rl_safe_workers.foreign_files import printable

ADVICE = "choose another place"


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


def check_pending(final: Path) -> None:
    """Refuses to make a directory where its temporary names are taken by something that is not ours. Writes nothing.

    Raises:
        CheckpointError: One line, with the name of what is in the way.
    """
    check_ours(pending_path(final), advice=ADVICE)
    if os.path.lexists(final):
        check_ours(final.with_name(final.name + REPLACED), advice=ADVICE)


def check_export(final: Path, *, overwrite: bool) -> None:
    """Refuses a place for an HF directory that is taken. Writes nothing.

    Raises:
        CheckpointMismatchError: One line, with the name of what is in the way.
    """
    shown = printable(str(final))
    if os.path.lexists(final) and not overwrite:
        raise CheckpointMismatchError(f"{shown} is there already: choose another place, or overwrite it")
    if os.path.lexists(final) and (final.is_symlink() or not final.is_dir()):
        raise CheckpointMismatchError(f"{shown} {_kind(final)}: {ADVICE}")
    try:
        check_pending(final)
    except CheckpointError as error:
        raise CheckpointMismatchError(str(error)) from error


def start_pending(final: Path, *, what: str, holds: Sequence[str] | None = None) -> Path:
    """Makes an empty directory to fill, in the place of one that an interrupted run has left.

    Args:
        final: The name that the directory will have.
        what: What will be in it, e.g. ``"a conversion"``.
        holds: Names of what will be at its top, besides a manifest; None: anything.

    Raises:
        CheckpointError: If it cannot be made, or its name is taken by something that is not ours.
    """
    make_parent(final)
    pending = pending_path(final)
    check_pending(final)
    try:
        remove(pending)
        claim(pending, what=what, holds=holds)
    except OSError as error:
        raise CheckpointError(f"cannot make {pending}: {error}; choose a writable place") from error
    return pending


def publish(pending: Path, final: Path, *, overwrite: bool = False) -> None:
    """Makes everything in a directory durable and gives it its final name; what had that name is removed after.

    Args:
        pending: The directory, from `start_pending`.
        final: Its final name.
        overwrite: Whether it may replace a directory that is not ours. Never a link, nor what is no directory.

    Raises:
        CheckpointError: If something has the final name that may not be replaced. It keeps it.
        OSError: If something cannot be made durable or renamed; what had the name then has it still, or is found
            beside it under the name with ``.replaced.incomplete`` if the machine stopped between the two renames.
    """
    for path in sorted(pending.rglob("*")):
        fsync(path)
    fsync(pending)
    if is_replacing := os.path.lexists(final):
        _give_up(final, overwrite=overwrite)
    replaced = final.with_name(final.name + REPLACED)
    if is_replacing:
        remove(replaced)
        final.rename(replaced)
    try:
        pending.rename(final)
    except OSError:
        if is_replacing:
            replaced.rename(final)
            release(final)
        raise
    fsync(final.parent)
    # Not before: a directory in progress without a marker would not be known as ours.
    release(final)
    remove(replaced)


def _give_up(final: Path, *, overwrite: bool) -> None:
    """Checks that what has a name may be replaced; what the caller was told to overwrite becomes ours."""
    if final.is_symlink() or not final.is_dir():
        raise CheckpointError(f"{printable(str(final))} {_kind(final)}: it is left alone; {ADVICE}")
    if overwrite:
        release(final)
        mark(final, what="overwritten", holds=None)
    else:
        check_ours(final, advice=ADVICE)


def _kind(final: Path) -> str:
    return "is a link" if final.is_symlink() else "is not a directory"


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
        with suppress(OSError, CheckpointError):
            remove(pending)
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write {what} at {pending}: {error}; free or change the place") from error
        raise
