"""A lock between runs, on a file that they share: whoever holds it says so, and loses it when its process ends.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rl_safe_workers.errors import CheckpointError

logger = logging.getLogger(__name__)

POLL_S = 0.2


def _try_lock(descriptor: int) -> bool:
    """Takes the lock if nobody has it.

    A POSIX record lock: it ends with the process, works between hosts over NFS and Lustre, and is not inherited, so
    that a writer process which outlives a killed trainer does not keep it. (``flock``, and with it the filelock
    library, fails the last; filelock also empties the file in which the holder is named.)
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _is_current(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one of that name: a holder removes it before letting go."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _describe_holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _try_acquire(path: Path) -> int | None:
    """Opens and locks the file; None while another process has it. Returns the descriptor that keeps the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if _try_lock(descriptor) and _is_current(descriptor, path):
            holder = {"host": socket.gethostname(), "pid": os.getpid()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


@contextmanager
def exclusive(path: Path, *, timeout: timedelta, setting: str) -> Iterator[bool]:
    """Holds a lock for the body, against every other process on every host that shares the file system.

    Not against another thread of this process, nor against a second lock on the same path in it.

    Args:
        path: The lock's file; its folder exists. Removed when the lock is let go.
        timeout: Longest wait.
        setting: The configuration key that moves the timeout, for the error.

    Yields:
        Whether another process had it first.

    Raises:
        CheckpointError: If another process still has it when the time is up, naming host and process; or if the file
            cannot be made or locked.
    """
    started_s, has_waited = time.monotonic(), False
    try:
        while (descriptor := _try_acquire(path)) is None:
            if not has_waited:
                logger.info("waiting for %s, which holds %s", _describe_holder(path), path)
            has_waited = True
            if (waited_s := time.monotonic() - started_s) >= timeout.total_seconds():
                raise CheckpointError(
                    f"{_describe_holder(path)} has held {path} for the {waited_s:.1f} s that this run waited: "
                    f"let it finish or end it, or raise {setting}"
                )
            time.sleep(POLL_S)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be locked: {error}; choose a place on a file system with locks"
        ) from error
    try:
        yield has_waited
    finally:
        path.unlink(missing_ok=True)  # while it is held: whoever waits notices and makes a new one
        os.close(descriptor)
