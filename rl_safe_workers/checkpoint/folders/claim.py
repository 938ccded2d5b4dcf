"""Holds the folders that a run writes to for as long as the run lives, so that two runs do not mix in them.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from rl_safe_workers.checkpoint.folders.lock import check_lock, exclusive
from rl_safe_workers.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

RUN_LOCK = "run.lock"
"""Name of the lock's file in a folder that a run writes to."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error numbers by which a file system says that it has no locks. Lustre's is ENOSYS."""


@contextmanager
def claimed(folders: Mapping[str, Path]) -> Iterator[None]:
    """Locks folders against every other run. Creates missing folders, and removes them at the end if they stay empty.

    The locks end with this process, however it dies. They work between hosts that share the file system. If a file
    system has no locks, this only logs a warning.

    Args:
        folders: Absolute paths, by the configuration key that names each.

    Raises:
        ConfigError: If a folder cannot be made or locked, or another run holds it. The message names that run's
            process.
    """
    made: list[Path] = []
    try:
        with ExitStack() as held:
            for key, folder in folders.items():
                made += [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
                _claim(folder, key, held)
            yield
    finally:
        for path in made:  # a folder comes before its parents
            with suppress(OSError):  # something was written there
                path.rmdir()


def _claim(folder: Path, key: str, held: ExitStack) -> None:
    lock = folder / RUN_LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(exclusive(lock, timeout=timedelta(0), setting=key, what=f"the folder {folder}"))
    except OSError as error:
        raise ConfigError(f"{key}: {folder} cannot be made: {error.strerror or error}") from error
    except CheckpointError as error:
        cause = error.__cause__
        # If a lock's file is there, it is another run's: ours was removed.
        if isinstance(cause, OSError) and cause.errno in _NO_LOCKS and not os.path.lexists(lock):
            logger.warning("%s: no other run may use %s: its file system has no locks (%s)", key, folder, cause)
        elif isinstance(cause, OSError) or not _is_lock(lock):
            raise ConfigError(f"{key}: {error}") from error
        else:
            raise ConfigError(f"another run is in the way: {error}") from error


def _is_lock(path: Path) -> bool:
    try:
        check_lock(path)
    except CheckpointError:
        return False
    return True
