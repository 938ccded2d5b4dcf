"""Messages between two processes of one machine and one user, over a Unix socket.

The kernel keeps the messages whole and in order. Nobody else can read, add or change one. If a process ends, the other
learns of it at once.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
from types import TracebackType
from typing import Self

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.foreign_files import printable

logger = logging.getLogger(__name__)

_PEER = struct.Struct("3i")
"""Process, user and group of the other side (unix(7), ``SO_PEERCRED``)."""
_LONGEST = 2**16
"""Longest message in bytes, with its name."""


class LocalListener:
    """Waits for another process to connect. Its address is in no file system, so that nothing is left of it."""

    def __init__(self) -> None:
        """Listens at once."""
        self.address = f"rl_safe_{secrets.token_hex(16)}"
        """For `LocalChannel.connect`. No other socket on this machine has it."""
        self._socket = _open_socket()
        self._socket.bind(_abstract(self.address))
        self._socket.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Listens no longer."""
        self._socket.close()

    def accept(self, deadline: Deadline) -> LocalChannel:
        """Waits for the other process. Refuses processes of other users.

        Raises:
            CommunicatorError: If it does not connect in time.
        """
        while not deadline.expired:
            self._socket.settimeout(deadline.remaining().total_seconds())
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            if (user := _user_of(connection)) == os.geteuid():
                return LocalChannel(connection)
            logger.warning("refused user %d of this machine, who connected to a socket of this run", user)
            connection.close()
        raise CommunicatorError(
            f"the other process has not connected within {deadline.waited_s:.1f} s", foreign=ForeignCause.TIMEOUT
        )


class LocalChannel:
    """One side of a connection. Each message has a name, and the receiver says which one it expects."""

    def __init__(self, connection: socket.socket) -> None:
        """Made by `LocalListener.accept` and `connect`."""
        self._socket = connection

    @classmethod
    def connect(cls, address: str, deadline: Deadline) -> Self:
        """Connects to a `LocalListener` of another process.

        Raises:
            CommunicatorError: If nobody listens, as in another container, or if it is another user.
        """
        connection = _open_socket()
        connection.settimeout(deadline.remaining().total_seconds())
        try:
            connection.connect(_abstract(address))
            user = _user_of(connection)
        except OSError as error:
            connection.close()
            raise CommunicatorError(
                f"cannot connect to a process that should be on this machine ({error.strerror or error}): two "
                "containers do not reach each other's sockets"
            ) from error
        if user != os.geteuid():
            connection.close()
            raise CommunicatorError(f"a process of user {user} listens where one of user {os.geteuid()} should")
        return cls(connection)

    def send(self, name: str, contents: bytes, deadline: Deadline) -> None:
        """Sends a message. Waits only if the other side has some 100 unread messages.

        Raises:
            CommunicatorError: If the other side has ended or closed the connection, or does not read.
            ValueError: If the message is longer than 64 KiB.
        """
        message = name.encode() + b"\0" + contents
        if len(message) > _LONGEST:
            raise ValueError(f"the message {name!r} has {len(message)} bytes, more than {_LONGEST}")
        self._socket.settimeout(deadline.remaining().total_seconds())
        try:
            self._socket.send(message)
        except OSError as error:
            raise _failed(error, f"sending {name!r}", deadline) from error

    def receive(self, name: str, deadline: Deadline) -> bytes:
        """Waits for the next message and returns its contents.

        Raises:
            CommunicatorError: If it does not arrive in time or has another name, or if the other side has ended or
                closed the connection.
        """
        self._socket.settimeout(deadline.remaining().total_seconds())
        try:
            message = self._socket.recv(_LONGEST)
        except OSError as error:
            raise _failed(error, f"waiting for {name!r}", deadline) from error
        if not message:
            raise _failed(None, f"waiting for {name!r}", deadline)
        found, _, contents = message.partition(b"\0")
        if found != name.encode():
            raise CommunicatorError(f"the next message is {printable(repr(found[:80]))} and not {name!r}")
        return contents

    def close(self) -> None:
        """Ends the connection. The other side's next call fails. Idempotent."""
        self._socket.close()


def _open_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _abstract(address: str) -> str:
    """Returns the address outside the file system (unix(7), "abstract")."""
    return f"\0{address}"


def _user_of(connection: socket.socket) -> int:
    """Returns the user of the process on the other side. The kernel noted it when the connection was made."""
    return int(_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])


def _failed(error: OSError | None, doing: str, deadline: Deadline) -> CommunicatorError:
    if isinstance(error, TimeoutError):
        text = f"wait timeout after {deadline.waited_s:.1f} s, {doing}"
        return CommunicatorError(text, foreign=ForeignCause.TIMEOUT)
    return CommunicatorError(f"{doing}: the other process has ended or left", foreign=ForeignCause.PEER_LOST)
