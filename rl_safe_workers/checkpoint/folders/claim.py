"""Holds the folders that a run writes to for as long as the run lives, so that two runs do not mix in them.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from rl_safe_workers.checkpoint.folders.lock import exclusive
from rl_safe_workers.errors import CheckpointError, ConfigError

RUN_LOCK = "run.lock"
"""Name of the lock's file in a folder that a run writes to."""


@contextmanager
def claimed(folders: Mapping[str, Path]) -> Iterator[None]:
    """Locks folders against every other run. Creates missing folders, and removes them at the end if they stay empty.

    The locks end with this process, however it dies. They work between hosts that share the file system.

    Args:
        folders: Absolute paths, by the configuration key that names each.

    Raises:
        ConfigError: If a folder cannot be made, or another run holds it. The message names that run's process.
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(exclusive(folder / RUN_LOCK, timeout=timedelta(0), setting=key, what=f"the folder {folder}"))
    except OSError as error:
        raise ConfigError(f"{key}: {folder} cannot be made: {error.strerror or error}") from error
    except CheckpointError as error:
        raise ConfigError(f"another run is in the way: {error}") from error
