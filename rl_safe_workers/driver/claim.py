"""Holds a run's folders for as long as it lives, so that two runs do not mix in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

from rl_safe_workers.checkpoint.lock import exclusive
from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import CheckpointError, ConfigError

RUN_LOCK = "run.lock"
"""Name of the lock's file in a folder that a run writes to."""


@contextmanager
def claimed(config: RunConfig) -> Iterator[None]:
    """Holds the folder of the run, and that of its checkpoints if it saves, against every other run.

    The locks end with this process, whatever it dies of. They hold between hosts that share the file system.

    Args:
        config: Of the run; its paths are absolute.

    Raises:
        ConfigError: If another run holds one of them: names the folder and that run's process.
    """
    trainer = config.trainer
    folders = {"trainer.run_name": Path(trainer.output_dir) / str(trainer.run_name)}
    if trainer.save_freq > 0:
        folders = {"trainer.default_local_dir": Path(str(trainer.default_local_dir)), **folders}
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
