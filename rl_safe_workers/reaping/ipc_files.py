"""Files in shared memory of processes that let others map their GPU memory (CUDA IPC), and then ended by a signal.

torch and CUDA remove them only where a process ends by itself: an actor that Ray ends, or that was killed, does not.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


def remove_ipc_files(pids: Iterable[int], *, since_s: float, folder: Path = SHARED_MEMORY) -> None:
    """Removes what processes that have ended left: ``torch_<pid>_...`` and ``cuda.shm.<user>.<pid in hex>....``.

    Args:
        pids: Processes of this machine that have ended.
        since_s: When they began, in Unix seconds. Older files are those of another process by the same number, as are
            those of another user.
        folder: Where shared memory is mounted.
    """
    for pid in pids:
        for pattern in (f"torch_{pid}_*", f"cuda.shm.{os.getuid()}.{pid:x}.*"):
            for file in folder.glob(pattern):
                try:
                    found = file.stat()
                    if found.st_uid == os.getuid() and found.st_mtime >= since_s:
                        file.unlink()
                except FileNotFoundError:
                    continue
                except OSError as error:
                    logger.warning("%s is left of process %d: %s", file, pid, error)
