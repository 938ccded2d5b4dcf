"""Makes a directory under a temporary name, and renames it to its final name when it is complete.

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
    """Returns the temporary path of a directory that is being made, beside its final path."""
    return final.with_name(final.name + INCOMPLETE)


def make_parent(final: Path) -> None:
    """Makes the parent folder of a directory.

    Raises:
        CheckpointError: If it cannot be made.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {final}: {error}; choose a writable place") from error


def check_pending(final: Path) -> None:
    """Refuses a directory if something that is not ours has one of its temporary names. Writes nothing.

    Raises:
        CheckpointError: One line, with the name of what is in the way.
    """
    check_ours(pending_path(final), advice=ADVICE)
    if os.path.lexists(final):
        check_ours(final.with_name(final.name + REPLACED), advice=ADVICE)


def check_export(final: Path, *, overwrite: bool) -> None:
    """Refuses a path for an HF directory if something is there. Writes nothing.

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
    """Makes an empty directory to fill. Replaces one that an interrupted run has left.

    Args:
        final: The name that the directory will have.
        what: Description of its contents, e.g. ``"a conversion"``.
        holds: Names of its future top-level entries, besides a manifest; None: anything.

    Raises:
        CheckpointError: If it cannot be made, or something that is not ours has its name.
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
    """Makes everything in a directory durable and gives it its final name. Then removes what had that name before.

    Args:
        pending: The directory, from `start_pending`.
        final: Its final name.
        overwrite: Whether it may replace a directory that is not ours. It never replaces a link or a file.

    Raises:
        CheckpointError: If something has the final name and may not be replaced. It stays there.
        OSError: If something cannot be made durable or renamed. The old directory then still has the name. If the
            machine stopped between the two renames, it is beside the name, with the suffix ``.replaced.incomplete``.
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
    # Only now: without a marker, a directory in progress would not be recognised as ours.
    release(final)
    remove(replaced)


def _give_up(final: Path, *, overwrite: bool) -> None:
    """Checks that the directory with the final name may be replaced. With ``overwrite``, marks it as ours."""
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
    """Removes a directory in progress when the body fails, and turns an OSError into a CheckpointError.

    Args:
        pending: The directory.
        what: What is being written, for the error, e.g. ``"the conversion"``.

    Raises:
        CheckpointError: Instead of an OSError, e.g. for a full disk, a missing permission or a vanished directory.
    """
    try:
        yield
    except BaseException as error:
        # If the removal fails, the name still marks the directory as incomplete, and the next run removes it.
        with suppress(OSError, CheckpointError):
            remove(pending)
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write {what} at {pending}: {error}; free or change the place") from error
        raise
