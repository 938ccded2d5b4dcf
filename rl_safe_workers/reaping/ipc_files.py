"""Removes the files of torch, CUDA, multiprocessing and loky that killed processes have left in shared memory.

Libraries remove these files only if a process exits by itself. If Ray ends an actor, or a signal kills it, they stay.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import psutil

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_SEGMENTS = ("psm_", "verl_weights_", "vllm_dist_")
"""Beginnings of the names of segments: Python's own, those in which verl 0.9.1 sends weights without CUDA IPC
(bucketed_weight_transfer.py), and those of the collectives of vLLM's CPU build. What follows is random."""


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


def segments_of(pids: Iterable[int], *, folder: Path = SHARED_MEMORY) -> frozenset[Path]:
    """Returns the segments of shared memory that processes have mapped.

    The name of a segment does not tell which process made it. So call this while they live.

    Args:
        pids: Processes of this machine. One that has ended, or is of another user, has none.
        folder: The folder where shared memory is mounted.
    """
    found: set[Path] = set()
    for pid in pids:
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
            found |= {Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines() if f"{folder}/" in line}
    return frozenset(path for path in found if path.parent == folder and path.name.startswith(_SEGMENTS))


def remove_ipc_files(
    pids: Iterable[int], *, since: Moment, segments: Iterable[Path] = (), folder: Path = SHARED_MEMORY
) -> None:
    """Removes the files of processes that have ended.

    These are ``torch_<pid>_*``, ``cuda.shm.<user>.<pid in hex>.*``, ``sem.loky-<pid>-*``, and segments that no living
    process has mapped.

    Args:
        pids: Processes of this machine that have ended.
        since: A moment before they began. Older files, and files of other users, belong to another process with the
            same id; they stay.
        segments: Results of `segments_of` from when the processes lived.
        folder: The folder where shared memory is mounted.
    """
    earliest_s = since.earliest_mtime_s()
    owned = {
        file: f"process {pid}"
        for pid in pids
        for pattern in (f"torch_{pid}_*", f"cuda.shm.{os.getuid()}.{pid:x}.*", f"sem.loky-{pid}-*")
        for file in folder.glob(pattern)
    }
    if unowned := {*segments} - owned.keys():
        in_use = segments_of(psutil.pids(), folder=folder)
        owned |= dict.fromkeys(unowned - in_use, "a process of the run")
    for file, owner in owned.items():
        try:
            found = file.stat()
            if found.st_uid == os.getuid() and found.st_mtime >= earliest_s:
                file.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s, left by %s, cannot be removed: %s", file, owner, error)
