"""Chooses a TCP port for a listener that starts later, such as the store of a process group."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["LOWEST", "port_to_listen_on"]

LOWEST = 20_000
"""Ray's workers listen below (``ray start --max-worker-port``, 19999 by default)."""
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100


def port_to_listen_on(address: str = "") -> int:
    """Returns a free TCP port that no outgoing connection can take before the listener starts.

    The kernel has a range of ports for outgoing connections. Binding port 0 gives a port of the same range. A worker
    takes half a minute to start. By then an outgoing connection may have that port (``EADDRINUSE``).

    Args:
        address: The local address to listen on; empty for all of them.

    Raises:
        OSError: If the address is not of this machine, or no port is free.
    """
    first_outgoing = int(_OUTGOING.read_text(encoding="ascii").split()[0]) if _OUTGOING.exists() else LOWEST
    for _ in range(_TRIES if first_outgoing > LOWEST else 0):
        port = random.randrange(LOWEST, first_outgoing)
        with suppress(OSError):
            return _bound(address, port)
    return _bound(address, 0)


def _bound(address: str, port: int) -> int:
    """Binds a port and returns its number. Port 0 lets the kernel choose."""
    with socket.socket() as listener:
        listener.bind((address, port))
        return int(listener.getsockname()[1])
