"""Gives one secret to the ranks of a host that has no channel of its own for it.

    ranks of one machine     a file of mode 0600, whose path is in the store. No other user can read it, and none can
                             put another in its place: what belongs to somebody else is refused. Its maker holds a lock
                             on it. The file of a maker that was killed goes when the next one is made.
    ranks of several         the store itself, until all have read it. That keeps out who connects later, and nobody
                             who reads the store while the ranks meet: keep the network of a cluster closed.

A run of the built-in driver uses none of this: its secret travels in the Ray call that passes the store's address on.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import stat
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from rl_safe_workers import env
from rl_safe_workers.control.board import lost_store
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.seal import SECRET_BYTES, new_secret
from rl_safe_workers.errors import Awaited, CommunicatorError, PhaseTimeoutError
from rl_safe_workers.ranks import trainer_id, trainer_ids

_KEY = "rl_safe_secret"
_PREFIX = "rl_safe_secret_"
"""Prefix of the names of files."""
_LOOK_S = 0.02
_own: bytes | None = None
"""The secret that this process has made: a host may build its groups anew on one store."""


class SharedSecret:
    """The secret of a host's ranks, and where it is as long as some have yet to read it.

    Attributes:
        secret: 32 bytes.
    """

    def __init__(self, store: Store, *, rank: int, size: int, phase: str, deadline: Deadline) -> None:
        """Makes the secret on rank 0; waits for it elsewhere.

        Args:
            store: A store that every rank is connected to.
            rank: This process's rank.
            size: Number of ranks.
            phase: The phase, for errors.
            deadline: Longest wait.

        Raises:
            PhaseTimeoutError: If rank 0 does not make it in time.
            CommunicatorError: If what is there is not of this user, or the store is gone.
        """
        self._store: Any = store
        self._remove: weakref.finalize[..., Any] | None = None
        """Removes the file, on the rank that has made one."""
        self._is_ours, self._size = rank == 0, size
        on_one_machine = _is_one_machine(store, size)
        with lost_store(f"phase {phase}: rank {rank}"):
            if self._is_ours:
                self.secret = self._make(on_one_machine)
            else:
                self.secret = self._await(on_one_machine, phase, deadline)

    def _make(self, on_one_machine: bool) -> bytes:
        global _own
        _own = _own or new_secret()
        place = _own.hex()
        if on_one_machine:
            _remove_leftovers()
            descriptor, place = _make_file()
            # At the latest at the end of this process; what kills it leaves the file to the next maker.
            self._remove = weakref.finalize(self, _remove_file, descriptor, place)
            os.write(descriptor, _own)
        self._store.set(_KEY, place)
        return _own

    def _await(self, on_one_machine: bool, phase: str, deadline: Deadline) -> bytes:
        while True:
            if self._store.check([_KEY]):
                place = bytes(self._store.compare_set(_KEY, "absent", "absent")).decode(errors="replace")
                try:
                    return _read_file(place) if on_one_machine else _from_hex(place)
                except FileNotFoundError:
                    pass  # of groups that were here before
            if deadline.expired:
                raise PhaseTimeoutError(
                    phase=phase,
                    awaited=Awaited("the script", frozenset(trainer_ids(range(self._size)))),
                    missing=[trainer_id(0)],
                    waited_s=deadline.waited_s,
                    setting=f"rl_safe.timeouts.{phase}",
                    detail=f"there is no secret behind key {_KEY!r} of the run's store",
                )
            time.sleep(_LOOK_S)

    def withdraw(self) -> None:
        """Removes it from where the others have read it, on rank 0; once all have. Idempotent."""
        if not self._is_ours:
            return
        self._is_ours = False
        if self._remove is not None:
            self._remove()
            return
        with lost_store("rank 0"):
            self._store.delete_key(_KEY)


def _is_one_machine(store: Store, size: int) -> bool:
    """Checks whether all ranks run on this machine, from what nobody can forge through the store."""
    if env.local_world_size() == size:
        return True
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    host = getattr(inner, "host", "")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _make_file() -> tuple[int, str]:
    """Makes an empty file of mode 0600, and locks it for as long as it is open. The lock ends with this process.

    Returns:
        Its descriptor and its path.
    """
    while True:
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX)
        try:
            # Of the open file, and not of the process: a process may make two, and look for leftovers between them.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_taken = os.fstat(descriptor).st_nlink == 0
        except BlockingIOError:
            is_taken = True
        except OSError:
            is_taken = False  # a file system without locks: there nobody removes what others have left
        if not is_taken:
            return descriptor, path
        os.close(descriptor)  # another maker has come before the lock, and removes it as a leftover


def _remove_file(descriptor: int, path: str) -> None:
    with suppress(OSError):
        Path(path).unlink()
    os.close(descriptor)


def _remove_leftovers() -> None:
    """Removes the files that makers of this user have left who were killed: nobody holds a lock on them."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # no such file, gone meanwhile, or its maker lives
            descriptor = _open_private(path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _open_private(path: str | Path) -> int:
    """Opens a regular file that this user has made for itself alone. Follows no link, and never blocks.

    Raises:
        OSError: If there is none.
        ValueError: If no file can have that name.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "not a private file of this user", str(path))


def _read_file(place: str) -> bytes:
    try:
        with os.fdopen(_open_private(place), "rb") as file:
            secret = file.read(SECRET_BYTES + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError):
        raise _forged() from None
    if len(secret) != SECRET_BYTES:
        raise _forged()
    return secret


def _from_hex(place: str) -> bytes:
    try:
        secret = bytes.fromhex(place)
    except ValueError:
        raise _forged() from None
    if len(secret) != SECRET_BYTES:
        raise _forged()
    return secret


def _forged() -> CommunicatorError:
    return CommunicatorError(
        f"key {_KEY!r} of the run's store does not lead to a secret that this user has made: another process writes to "
        "the store; end it, or keep others away from the store's port, and start the run again"
    )
