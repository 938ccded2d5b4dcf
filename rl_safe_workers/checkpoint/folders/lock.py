"""A lock between runs, on a shared file. The holder writes its name there; the lock ends with its process.

The file names its holder from its first moment on: it is written under another name and then linked to its own. A file
that does not name a holder is not our lock, so it is neither emptied nor removed.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_files import MALFORMED, printable, read_foreign

logger = logging.getLogger(__name__)

POLL_S = 0.2
_LIMIT_BYTES = 4096
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_held: set[tuple[int, int]] = set()
"""Device and inode of the locks that this process holds. It must not open such a file again: closing any descriptor of
the file releases the lock."""
_changing = threading.Lock()
"""Held by the thread that is taking or releasing a lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Contents of a lock's file."""

    host: str
    pid: int

    def __str__(self) -> str:
        """Names the process."""
        return f"process {self.pid} on {printable(self.host)}"

    @classmethod
    def parse(cls, text: bytes) -> Holder | None:
        """Parses the contents of a lock's file; None if it is not our lock."""
        try:
            fields = json.loads(text)
            host, pid = fields["host"], fields["pid"]
        except MALFORMED:
            return None
        is_one = fields.keys() == {"host", "pid"} and isinstance(host, str) and type(pid) is int
        return cls(host=host, pid=pid) if is_one and len(host) <= 256 and 0 < pid < 2**31 else None


def _me() -> Holder:
    return Holder(host=socket.gethostname(), pid=os.getpid())


def _try_lock(descriptor: int) -> bool:
    """Takes the lock if nobody has it.

    The lock is a POSIX record lock. It ends with the process, and it works between hosts over NFS and Lustre. Child
    processes do not inherit it, so a writer process that outlives a killed trainer does not keep it. ``flock``, which
    the filelock library uses, is inherited. Filelock also empties the file, which would erase the holder's name.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _is_current(descriptor: int, path: Path) -> bool:
    """Returns True if the path still leads to the open file: a holder removes the file before it releases the lock."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except (FileNotFoundError, NotADirectoryError):  # also if something else took the place of its folder
        return False


def check_lock(path: Path) -> None:
    """Refuses a path for a lock that something else occupies. Writes nothing, and does not wait.

    Raises:
        CheckpointError: One line, with the name and what to do.
    """
    try:
        if _identity(path.lstat()) in _held:
            return
        is_lock = not path.is_symlink() and Holder.parse(read_foreign(path, limit_bytes=_LIMIT_BYTES)) is not None
    except FileNotFoundError:
        return
    except OSError:
        is_lock = False
    if not is_lock:
        raise _not_a_lock(path)


def _not_a_lock(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{printable(str(path))} cannot be locked: it is no lock of ours, so it is left alone; move it away or choose "
        "another place"
    )


def _describe_holder(path: Path) -> str:
    try:
        if _identity(path.lstat()) in _held:
            return "this process"
        holder = Holder.parse(read_foreign(path, limit_bytes=_LIMIT_BYTES))
    except OSError:
        holder = None
    return "another process" if holder is None else str(holder)


def _make(path: Path) -> None:
    """Makes the lock's file, with this process as its holder, unless something has the name."""
    own = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        _write(own)
        os.link(own, path)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        with suppress(FileExistsError):
            _write(path)  # a process that found an unfinished file would refuse it
    finally:
        own.unlink(missing_ok=True)


def _write(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        os.write(descriptor, json.dumps(asdict(_me())).encode())
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """Opens the lock's file, and creates it if it does not exist.

    Raises:
        CheckpointError: If it is a link, or not a regular file.
        OSError: If it cannot be made or opened.
    """
    while True:
        if not os.path.lexists(path):
            _make(path)
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                raise _not_a_lock(path)
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # its holder has released it


def _try_acquire(path: Path) -> int | None:
    """Takes the lock and returns the descriptor that keeps it; None while another process has it."""
    with _changing:
        return None if _is_held_here(path) else _try_to_take(path)


def _try_to_take(path: Path) -> int | None:
    while True:
        with ExitStack() as opened:
            descriptor = _open(path)
            opened.callback(os.close, descriptor)
            try:
                if not _try_lock(descriptor):
                    return None
            except OSError:
                if Holder.parse(os.pread(descriptor, _LIMIT_BYTES, 0)) == _me():
                    path.unlink(missing_ok=True)  # this process has just made it
                raise
            if not _is_current(descriptor, path):
                continue
            holder = Holder.parse(os.pread(descriptor, _LIMIT_BYTES, 0))
            if holder is None:
                raise _not_a_lock(path)
            if holder == _me():
                opened.pop_all()
                _held.add(_identity(os.fstat(descriptor)))
                return descriptor
            # The file's process has ended. Remove it while the lock is held: a waiting process notices and makes a new
            # file.
            path.unlink()


def _is_held_here(path: Path) -> bool:
    try:
        return _identity(path.lstat()) in _held
    except OSError:
        return False


def _let_go(descriptor: int, path: Path) -> None:
    with _changing:
        if _is_current(descriptor, path):
            path.unlink(missing_ok=True)  # while the lock is held: a waiting process notices and makes a new file
        _held.discard(_identity(os.fstat(descriptor)))
        os.close(descriptor)


@contextmanager
def exclusive(path: Path, *, timeout: timedelta, setting: str, what: str | None = None) -> Iterator[bool]:
    """Holds a lock for the body, against every other process on every host that shares the file system.

    It also excludes other threads of this process, and a second lock on the same path in this process.

    Args:
        path: The lock's file; its folder exists. The file is removed when the lock is released.
        timeout: Longest wait; zero tries once.
        setting: The configuration key that the error names. With a timeout, the key that sets it; without one, the key
            that sets the folder.
        what: What is locked, for the error; None: the file.

    Yields:
        Whether another process had it first.

    Raises:
        CheckpointError: If another process still has it when the time is up; the message names host and process. Also
            if the file cannot be made or locked, or is not our lock.
    """
    started_s, has_waited, shown = time.monotonic(), False, printable(what or str(path))
    try:
        while (descriptor := _try_acquire(path)) is None:
            if not timeout:
                raise CheckpointError(
                    f"{_describe_holder(path)} holds {shown}: let it finish or end it, or change {setting}"
                )
            if not has_waited:
                logger.info("waiting for %s, which holds %s", _describe_holder(path), shown)
            has_waited = True
            if (waited_s := time.monotonic() - started_s) >= timeout.total_seconds():
                raise CheckpointError(
                    f"{_describe_holder(path)} has held {shown} for the {waited_s:.1f} s that this run waited: "
                    f"let it finish or end it, or raise {setting}"
                )
            time.sleep(POLL_S)
    except OSError as error:
        raise CheckpointError(
            f"{printable(str(path))} cannot be locked: {error}; choose a place on a file system with locks"
        ) from error
    try:
        yield has_waited
    finally:
        _let_go(descriptor, path)
