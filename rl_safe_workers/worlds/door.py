"""Keeps new connections away from the run's store while no process of the run needs to connect.

torch's TCPStore has no password. Anyone who can connect to its port may read and write every key. On the loopback
interface, every user of the machine can connect. A run connects only in the phases ``world`` and ``joint``. At
other times, the port is shut: the kernel drops connection requests. Existing connections go on.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import socket
import struct
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_safe_workers.errors import CommunicatorError

logger = logging.getLogger(__name__)

_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
"""Options of Linux (asm-generic/socket.h). Any user may set a filter on a socket of its own."""
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A classic BPF program of one instruction: keep 0 bytes of every packet."""
_ESTABLISHED = "01"
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Door:
    """Shuts and opens one listening socket on the loopback interface. Other interfaces have firewalls for this."""

    def __init__(self, listener: socket.socket) -> None:
        """Takes over a duplicate of the socket, and closes it with the last reference to the door. The door is open."""
        self._listener = listener
        weakref.finalize(self, listener.close)
        self._host, self._port = listener.getsockname()[:2]
        self._address = _plain(ipaddress.ip_address(self._host))

    def shut(self) -> None:
        """Refuses new connections from now on.

        Raises:
            CommunicatorError: If another user of this machine is already connected; names user and socket.
        """
        if not self._address.is_loopback:
            return
        program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
        try:
            self._listener.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program))
            )
        except OSError as error:
            logger.warning(
                "the run's store at %s:%d stays open to every user of this machine: %s", self._host, self._port, error
            )
        if strangers := _connected_users(self._address, self._port) - {os.getuid()}:
            users = ", ".join(map(str, sorted(strangers)))
            raise CommunicatorError(
                f"user {users} of this machine has connected to the run's store at {self._host}:{self._port}, which "
                "has no password: what the ranks have told each other there may be forged; end that process and start "
                "the run again"
            )

    def open(self) -> None:
        """Accepts new connections again. Idempotent."""
        if self._address.is_loopback:
            try:
                self._listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            except FileNotFoundError:
                return  # it was open

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Opens the door for the body. Shuts it after the body, unless the body raises."""
        self.open()
        yield
        self.shut()


def _connected_users(address: _Address, port: int) -> set[int]:
    """Returns the ids of this machine's users who have a socket connected to an address and port."""
    users = set()
    for name in ("tcp", "tcp6"):
        table = Path("/proc/net") / name
        for row in table.read_text(encoding="ascii").splitlines()[1:] if table.exists() else ():
            fields = row.split()
            if fields[3] == _ESTABLISHED and _read_peer(fields[2]) == (address, port):
                users.add(int(fields[7]))
    return users


def _read_peer(text: str) -> tuple[_Address, int]:
    """Reads an address and port of ``/proc/net/tcp``: ``0100007F:1F90`` is port 8080 of 127.0.0.1 on x86.

    The kernel prints each 32 bits of an address as a number in the machine's byte order, but stores them in network
    order.
    """
    address, _, port = text.partition(":")
    words = [int(address[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(address), 8)]
    return _plain(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _plain(address: _Address) -> _Address:
    """Returns the IPv4 address if this is an IPv4-mapped IPv6 address; else the address itself."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
