"""Holds the folders that a run writes to for as long as the run lives, so that two runs do not mix in them.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

from rl_safe_workers.checkpoint.lock import exclusive
from rl_safe_workers.errors import CheckpointError, ConfigError

RUN_LOCK = "run.lock"
"""Name of the lock's file in a folder that a run writes to."""


@contextmanager
def claimed(folders: Mapping[str, Path]) -> Iterator[None]:
    """Holds folders against every other run; makes those that are not there.

    The locks end with this process, whatever it dies of. They hold between hosts that share the file system.

    Args:
        folders: Absolute paths, by the configuration key that names each.

    Raises:
        ConfigError: If a folder cannot be made, or another run holds it; then names that run's process.
    """
    with ExitStack() as held:
        for key, folder in folders.items():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(
                    exclusive(folder / RUN_LOCK, timeout=timedelta(0), setting=key, what=f"the folder {folder}")
                )
            except OSError as error:
                raise ConfigError(f"{key}: {folder} cannot be made: {error.strerror or error}") from error
            except CheckpointError as error:
                raise ConfigError(f"another run is in the way: {error}") from error
        yield
