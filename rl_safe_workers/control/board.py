"""The signed messages of a run in its store. Only this module numbers operations, and names and deletes their keys.

    put, peek      a message under a key that one rank writes
    first          a message that several ranks race to write; the first one stays
    note, notes    lines of a log that many ranks add to, read with one request
    number         counts the operations of a name, in the store, which outlives a worker

It does not use the store's counters (``add``): nobody can sign a counter. If a stranger overwrites one with text, its
reader also loses the connection.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store

from rl_safe_workers.control.connection import own_connection
from rl_safe_workers.control.seal import Seal
from rl_safe_workers.errors import StoreLostError

logger = logging.getLogger(__name__)

_ABSENT = "absent"
"""Stands for a missing message. No message equals it, because each begins with its signature."""


class Board:
    """One rank's messages. Only `wait` and `read` wait. Not thread-safe.

    Every method raises StoreLostError if the process that owns the store has ended, and CommunicatorError, naming the
    key, for a message that no rank of this run has signed.

    Attributes:
        phase: The phase that the rank is in, for errors.
    """

    def __init__(self, store: Store, *, secret: bytes, who: str) -> None:
        """Connects.

        Args:
            store: The run's store.
            secret: The run's secret; see `seal.new_secret`.
            who: This process, for errors, e.g. ``"rank 1 of training world"``.
        """
        # Use a connection of its own. NCCL's first collectives wait in the group's connection, and block it for the
        # rest of the process.
        self._store: Any = own_connection(store)
        self._seal, self._who = Seal(secret), who
        self.phase = ""
        self._numbers: dict[str, int] = {}
        self._mine: dict[str, dict[int, set[str]]] = {}
        """Keys that this rank must delete later, by name and number of their operation."""

    def of(self, who: str) -> Board:
        """Returns the board of this process as a rank of another world. Both share one connection and one count."""
        other = copy(self)
        other._who = who
        return other

    def number(self, name: str, rank: int) -> int:
        """Begins an operation; returns how many with this name the rank has begun, this one included.

        The count is in the store, so a restarted worker continues it. An attacker who can replay earlier contents of
        the store can set back the count of a restarted worker. A living worker remembers its own count.
        """
        key = f"{name}/number/{rank}"
        if name not in self._numbers:
            self._numbers[name] = int(self.peek(key) or b"0")
        self._numbers[name] += 1
        self.put(key, str(self._numbers[name]).encode())
        return self._numbers[name]

    def keep(self, name: str, number: int, key: str) -> str:
        """Returns the full key of an operation, and notes that this rank must delete it later."""
        full = self.key(name, number, key)
        self._mine.setdefault(name, {}).setdefault(number, set()).add(full)
        return full

    def key(self, name: str, number: int, key: str) -> str:
        """Returns the full key of an operation."""
        return f"{name}/{number}/{key}"

    def forget(self, name: str, *, before: int, but: str | None = None) -> None:
        """Deletes this rank's keys of earlier operations with a name. Call it once no rank needs them any more.

        Args:
            name: Name of the operations.
            before: The first number that stays.
            but: Prefix of full keys that also stay.
        """
        kept = self._mine.get(name, {})
        for number in [number for number in kept if number < before]:
            keys = kept.pop(number)
            if stay := {key for key in keys if but is not None and key.startswith(but)}:
                kept[number] = stay
            self.delete(keys - stay)

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes keys."""
        with self._in_reach():
            for key in keys:
                self._store.delete_key(key)

    def put(self, key: str, contents: bytes) -> None:
        """Writes or replaces a message. Waits for no answer, because the store's owner may end before it answers."""
        with self._in_reach():
            self._store.set(key, self._seal.close(key, contents))

    def peek(self, key: str) -> bytes | None:
        """Returns a message; None if nobody has written it."""
        with self._in_reach():
            # Unlike get, this never waits. It sets nothing, since no message equals the expected value.
            message = bytes(self._store.compare_set(key, _ABSENT, _ABSENT))
        return None if message == _ABSENT.encode() else self._seal.open(key, message)

    def read(self, keys: Sequence[str], timeout: timedelta) -> list[bytes] | None:
        """Waits for messages with one request; returns them, or None if one is missing when the time is up."""
        with self._in_reach():
            self._store.set_timeout(timeout)
            try:
                messages = self._store.multi_get(list(keys))
            except DistStoreError:
                return None
        return [self._seal.open(key, bytes(message)) for key, message in zip(keys, messages, strict=True)]

    def first(self, key: str, contents: bytes) -> bytes:
        """Writes a message unless there is one; returns the message that is then there. Contents must be ASCII."""
        with self._in_reach():
            message = self._store.compare_set(key, "", self._seal.close(key, contents, compress=False).decode("ascii"))
        return self._seal.open(key, bytes(message))

    def has(self, keys: Sequence[str]) -> bool:
        """Checks whether there is something under every key, signed or not."""
        with self._in_reach():
            return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> bool:
        """Waits until there is something under every key, signed or not; returns False when the time is up."""
        with self._in_reach():
            try:
                self._store.wait(list(keys), timeout)
            except DistStoreError:
                return False
        return True

    def note(self, key: str, rank: int, text: str = "") -> None:
        """Adds a rank's line to a log. Waits for no answer."""
        line = json.dumps([rank, text]).encode()
        with self._in_reach():
            # Begin a new line, in case somebody else has left text at the end.
            self._store.append(key, (b"\n" + self._seal.sign(key, line) + line).decode("ascii"))

    def notes(self, key: str, *, at_least: int = 0) -> tuple[dict[int, str], bool]:
        """Reads a log.

        Args:
            key: Key of the log.
            at_least: Smallest number of lines to check signatures for; with fewer lines, the result is empty.

        Returns:
            The text of each rank that has signed a line, and True if the log has lines that no rank has signed.
        """
        with self._in_reach():
            log = bytes(self._store.compare_set(key, _ABSENT, _ABSENT))
        if log == _ABSENT.encode() or log.count(b"\n") < at_least:
            return {}, False
        found: dict[int, str] = {}
        is_forged = False
        for row in filter(None, log.split(b"\n")):
            signature, line = row[:64], row[64:]
            if self._seal.is_signed(key, line, signature):
                rank, text = json.loads(line)
                found[rank] = text
            else:
                is_forged = True
        return found, is_forged

    def signature(self, text: str) -> bytes:
        """Returns bytes that only ranks of the run can make from a text."""
        return self._seal.sign(text, b"")

    def _in_reach(self) -> AbstractContextManager[None]:
        return lost_store(f"phase {self.phase}: {self._who}")


@contextmanager
def lost_store(who: str) -> Iterator[None]:
    """Turns torch's errors in the body into StoreLostError if the store is gone.

    Args:
        who: The process that has lost it, for the error.
    """
    try:
        yield
    except DistNetworkError as error:
        raise StoreLostError(
            f"{who} has lost the run's store: its owner, training rank 0, has ended, or its machine is gone"
        ) from error


def forget_where(store: Store, is_gone: Callable[[str], bool]) -> None:
    """Deletes keys for which ``is_gone`` is True. One rank does it for all. No effect if the store cannot list keys."""
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    try:
        for key in filter(is_gone, inner.list_keys()):
            inner.delete_key(key)
    except RuntimeError as error:
        logger.debug("keys of the past stay in the store: %s", error)
