"""Messages between two processes of one machine and one user, over a Unix socket.

The kernel keeps the messages whole and in order, and lets nobody else read or change them. It tells each side the user
of the other process. So that no other process of this user gets in, the first message each way is one that only the
right process can make. If a process ends or closes its side, the other learns of it at once.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self
from weakref import WeakSet

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.foreign_files import printable

logger = logging.getLogger(__name__)

_PEER = struct.Struct("3i")
"""Process, user and group of the other side (unix(7), ``SO_PEERCRED``)."""
_LONGEST = 2**16
"""Longest message in bytes, with its name."""
_GREETING, _GREETING_S = "greeting", 5.0
"""Name of the first message each way, and the longest wait of a listener for it in seconds."""
_ASK_S = 0.01
_open: WeakSet[LocalChannel] = WeakSet()
"""The channels of this process."""


class Greeting(NamedTuple):
    """The first messages of a connection. Each is a secret of the two processes."""

    ours: bytes
    theirs: bytes


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

    def accept(self, greeting: Greeting, deadline: Deadline) -> LocalChannel:
        """Waits for the other process. Refuses processes of other users, and those without the right greeting.

        Raises:
            CommunicatorError: If it does not connect in time.
        """
        is_told = False
        while not deadline.expired:
            self._socket.settimeout(deadline.remaining().total_seconds())
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            channel, user = LocalChannel(connection), _user_of(connection)
            soon = Deadline.after(min(_GREETING_S, deadline.left_s))
            if user == os.geteuid() and channel.is_greeted(greeting, soon, answers=True):
                return channel
            channel.close()
            if not is_told:
                logger.warning("refused a process of user %d, which connected to a socket of this run", user)
            is_told = True
        raise CommunicatorError(
            f"the other process has not connected within {deadline.waited_s:.1f} s", foreign=ForeignCause.TIMEOUT
        )


class LocalChannel:
    """One side of a connection. Each message has a name, and the receiver says which one it expects."""

    def __init__(self, connection: socket.socket) -> None:
        """Made by `LocalListener.accept` and `connect`."""
        self._socket = connection
        _open.add(self)

    @classmethod
    def connect(cls, address: str, greeting: Greeting, deadline: Deadline) -> Self:
        """Connects to a `LocalListener` of another process.

        Raises:
            CommunicatorError: If nobody listens, or not the right process.
        """
        connection = _open_socket()
        channel = cls(connection)
        try:
            _connect(connection, address, deadline)
            user = _user_of(connection)
        except OSError as error:
            channel.close()
            raise CommunicatorError(
                f"cannot connect to a process that should be on this machine ({error.strerror or error}): does it run "
                "in another container?"
            ) from error
        if user != os.geteuid() or not channel.is_greeted(greeting, deadline, answers=False):
            channel.close()
            raise CommunicatorError(f"a process of user {user} listens where one of this run should")
        return channel

    def is_greeted(self, greeting: Greeting, deadline: Deadline, *, answers: bool) -> bool:
        """Exchanges the first messages. Returns False if the other side does not send the right one in time.

        Args:
            greeting: The messages.
            deadline: Longest wait.
            answers: True to send ours only after theirs, so that no stranger gets it.
        """
        try:
            if not answers:
                self.send(_GREETING, greeting.ours, deadline)
            is_right = hmac.compare_digest(self.receive(_GREETING, deadline), greeting.theirs)
            if answers and is_right:
                self.send(_GREETING, greeting.ours, deadline)
        except CommunicatorError:
            return False
        return is_right

    def send(self, name: str, contents: bytes, deadline: Deadline) -> None:
        """Sends a message. Waits only if the other side has some 70 unread messages.

        Raises:
            CommunicatorError: If the other side has ended or closed the connection, or does not read.
            ValueError: If the message is longer than 64 KiB.
        """
        message = name.encode() + b"\0" + contents
        if len(message) > _LONGEST:
            raise ValueError(f"the message {name!r} has {len(message)} bytes, more than {_LONGEST}")
        try:
            self._socket.settimeout(deadline.remaining().total_seconds())
            self._socket.send(message)
        except OSError as error:
            raise _failed(error, f"sending {name!r}", deadline) from error

    def receive(self, name: str, deadline: Deadline) -> bytes:
        """Waits for the next message and returns its contents.

        Raises:
            CommunicatorError: If it does not arrive in time or has another name, or if the other side has ended or
                closed the connection.
        """
        try:
            self._socket.settimeout(deadline.remaining().total_seconds())
            message = self._socket.recv(_LONGEST)
            if not message:
                raise ConnectionResetError
        except OSError as error:
            raise _failed(error, f"waiting for {name!r}", deadline) from error
        found, _, contents = message.partition(b"\0")
        if found != name.encode():
            raise CommunicatorError(f"the next message is {printable(repr(found[:80]))} and not {name!r}")
        return contents

    def close(self) -> None:
        """Ends the connection. The other side's calls fail, also one that waits now. Idempotent."""
        with suppress(OSError):  # the other side has ended it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @staticmethod
    def forget_in_child() -> None:
        """Closes a forked process's copies. Otherwise the other side would not notice the end of its parent."""
        for channel in list(_open):
            channel._socket.close()


os.register_at_fork(after_in_child=LocalChannel.forget_in_child)


def _open_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _abstract(address: str) -> str:
    """Returns the address outside the file system (unix(7), "abstract")."""
    return f"\0{address}"


def _connect(connection: socket.socket, address: str, deadline: Deadline) -> None:
    """Connects, and tries again as long as too many others wait for the listener."""
    connection.settimeout(deadline.remaining().total_seconds())
    while True:
        try:
            connection.connect(_abstract(address))
            return
        except BlockingIOError:
            if deadline.expired:
                raise
            time.sleep(_ASK_S)


def _user_of(connection: socket.socket) -> int:
    """Returns the user of the process on the other side. The kernel noted it when the connection was made."""
    return int(_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])


def _failed(error: OSError, doing: str, deadline: Deadline) -> CommunicatorError:
    if isinstance(error, TimeoutError):
        text = f"wait timeout after {deadline.waited_s:.1f} s, {doing}"
        return CommunicatorError(text, foreign=ForeignCause.TIMEOUT)
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return CommunicatorError(f"{doing}: the other process has ended or left", foreign=ForeignCause.PEER_LOST)
    return CommunicatorError(f"{doing}: {error.strerror or error}")
