"""Gives one secret to the ranks of a host that has no channel of its own for it.

    ranks of one machine     a file of mode 0600, whose path is in the store. No other user can read it, and none can
                             put another in its place: what belongs to somebody else is refused.
    ranks of several         the store itself, until all have read it. That keeps out who connects later, and nobody
                             who reads the store while the ranks meet: keep the network of a cluster closed.

A run of the built-in driver uses none of this: its secret travels in the Ray call that passes the store's address on.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import stat
import tempfile
import time
import weakref
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
        self._file: Path | None = None
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
            folder = Path(tempfile.mkdtemp(prefix="rl_safe_secret_"))  # of mode 0700
            self._file = folder / "secret"
            # At the latest at the end of this process.
            self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_own)
            place = str(self._file)
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
                    phase=phase, awaited=Awaited("the script", frozenset(trainer_ids(range(self._size)))),
                    missing=[trainer_id(0)], waited_s=deadline.waited_s,
                    setting=f"rl_safe.timeouts.{phase}",
                    detail=f"there is no secret behind key {_KEY!r} of the run's store",
                )  # fmt: skip
            time.sleep(_LOOK_S)

    def withdraw(self) -> None:
        """Removes it from where the others have read it, on rank 0; once all have. Idempotent."""
        if not self._is_ours:
            return
        self._is_ours = False
        if self._file is not None:
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


def _read_file(place: str) -> bytes:
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(file.fileno())
            is_private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
            secret = file.read(SECRET_BYTES + 1) if is_private else b""
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
