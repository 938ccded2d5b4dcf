"""Removes the files in shared memory that killed processes have left from sharing GPU memory (CUDA IPC).

torch and CUDA remove these files only if a process exits by itself. An actor that Ray ends, or that is killed, leaves
them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Self

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


class Moment(NamedTuple):
    """A moment on this machine, by its wall clock and its monotonic clock.

    Example: ``Moment(unix_s=1763.2, monotonic_s=20.5)``
    """

    unix_s: float
    monotonic_s: float

    @classmethod
    def now(cls) -> Self:
        """Returns the present moment."""
        return cls(time.time(), time.monotonic())

    def earliest_mtime_s(self) -> float:
        """Returns the smallest mtime, in Unix seconds, that a file made after this moment may have.

        It takes into account that the wall clock may have been set back since.
        """
        now = Moment.now()
        set_by_s = (now.unix_s - self.unix_s) - (now.monotonic_s - self.monotonic_s)
        return self.unix_s + min(0.0, set_by_s)


def remove_ipc_files(pids: Iterable[int], *, since: Moment, folder: Path = SHARED_MEMORY) -> None:
    """Removes the files of processes that have ended: ``torch_<pid>_*`` and ``cuda.shm.<user>.<pid in hex>.*``.

    Args:
        pids: Processes of this machine that have ended.
        since: A moment before they began. Older files, and files of other users, belong to another process with the
            same id; they stay.
        folder: The folder where shared memory is mounted.
    """
    earliest_s = since.earliest_mtime_s()
    for pid in pids:
        for pattern in (f"torch_{pid}_*", f"cuda.shm.{os.getuid()}.{pid:x}.*"):
            for file in folder.glob(pattern):
                try:
                    found = file.stat()
                    if found.st_uid == os.getuid() and found.st_mtime >= earliest_s:
                        file.unlink()
                except FileNotFoundError:
                    continue
                except OSError as error:
                    logger.warning("%s is left of process %d: %s", file, pid, error)
