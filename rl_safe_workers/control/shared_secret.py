"""Distributes one secret to the ranks of a host framework that has no channel of its own for it.

    ranks of one machine     a file of mode 0600, whose path is in the store. Other users cannot read it. They cannot
                             replace it either, because readers refuse a file of another user. Its maker holds a lock on
                             it. If the maker is killed, the next maker removes the file.
    ranks of several         the store itself, until all have read it. A process that connects later cannot read it, but
                             one that reads the store meanwhile can: keep the network of a cluster closed.

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
from rl_safe_workers.setting_names import timeout_setting

_KEY = "rl_safe_secret"
_PREFIX = "rl_safe_secret_"
"""Prefix of the names of files."""
_LOOK_S = 0.02
_own: bytes | None = None
"""The secret that this process has made. It is reused, because a host may rebuild its groups on one store."""


class SharedSecret:
    """The secret of a host's ranks, and the place where they read it, until all have.

    Attributes:
        secret: 32 bytes.
    """

    def __init__(self, store: Store, *, rank: int, size: int, phase: str, deadline: Deadline) -> None:
        """Makes the secret on rank 0; waits for it elsewhere.

        Args:
            store: A store to which every rank is connected.
            rank: This process's rank.
            size: Number of ranks.
            phase: The phase, for errors.
            deadline: Longest wait.

        Raises:
            PhaseTimeoutError: If rank 0 does not make it in time.
            CommunicatorError: If the file does not belong to this user, or the store is gone.
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
            # Remove the file at the latest when this process ends. If it is killed, the next maker removes the file.
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
                    pass  # the file of earlier groups
            if deadline.expired:
                raise PhaseTimeoutError(
                    phase=phase,
                    awaited=Awaited("the script", frozenset(trainer_ids(range(self._size)))),
                    missing=[trainer_id(0)],
                    waited_s=deadline.waited_s,
                    setting=timeout_setting(phase),
                    detail=f"there is no secret behind key {_KEY!r} of the run's store",
                )
            time.sleep(_LOOK_S)

    def withdraw(self) -> None:
        """Removes the secret's file or key, on rank 0. Call it once all have read it. Idempotent."""
        if not self._is_ours:
            return
        self._is_ours = False
        if self._remove is not None:
            self._remove()
            return
        with lost_store("rank 0"):
            self._store.delete_key(_KEY)


def _is_one_machine(store: Store, size: int) -> bool:
    """Checks whether all ranks run on this machine, by facts that nobody can forge through the store."""
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
    """Makes an empty file of mode 0600, and locks it while it is open. The lock ends with this process.

    Returns:
        Its descriptor and its path.
    """
    while True:
        descriptor, path = tempfile.mkstemp(prefix=_PREFIX)
        try:
            # Lock the open file, not the process: a process may make two files, and look for leftovers in between.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_taken = os.fstat(descriptor).st_nlink == 0
        except BlockingIOError:
            is_taken = True
        except OSError:
            is_taken = False  # on a file system without locks, nobody removes leftovers
        if not is_taken:
            return descriptor, path
        os.close(descriptor)  # another maker has come before the lock, and removes it as a leftover


def _remove_file(descriptor: int, path: str) -> None:
    with suppress(OSError):
        Path(path).unlink()
    os.close(descriptor)


def _remove_leftovers() -> None:
    """Removes this user's files whose makers were killed, so that nobody holds a lock on them."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # no such file, gone meanwhile, or its maker lives
            descriptor = _open_private(path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _open_private(path: str | Path) -> int:
    """Opens a regular file that belongs to this user and that no other user can access. Follows no link; never blocks.

    Raises:
        OSError: If there is no such file.
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
