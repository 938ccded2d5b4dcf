"""Connections to the run's store that end if the machine of its owner is gone.

A machine that loses its power or its network closes no connection. torch's client then waits for an answer without end,
whatever its timeout (seen with torch 2.13). The kernel can find out: it asks the other machine from time to time
(tcp(7), ``SO_KEEPALIVE``).

The kernel of a stopped process still answers. So the connection ends only if bytes wait that the process does not read.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

logger = logging.getLogger(__name__)

LOST_S = 60
"""Seconds without an answer of the other machine after which its connections end."""
_ASKS = 6
"""Number of questions in this time."""
_OPEN_FILES = Path("/proc/self/fd")


def own_connection(store: Store) -> Any:
    """Returns a new connection to the run's store, which ends if the machine of its owner is gone. Not collective.

    Operations on it then raise ``DistNetworkError``, at most `LOST_S` seconds and one question later.

    Args:
        store: A store to which this process is connected.
    """
    own = store.clone()  # type: ignore[attr-defined]
    end_if_lost(own)
    return own


def end_if_lost(store: Store) -> None:
    """Ends this process's connections to a store once its machine has been silent for `LOST_S`. Not collective.

    Has no effect on a store without connections, such as a ``FileStore``. If the kernel refuses it, it only logs that.
    """
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, TCPStore):
        return
    try:
        for connection in _connections_to(inner.port):
            _end_if_lost(connection)
    except OSError as error:
        logger.warning("if the machine of the store's owner is lost, this process may wait without end: %s", error)


def _end_if_lost(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        socket.TCP_KEEPIDLE: max(1, LOST_S // _ASKS),
        socket.TCP_KEEPINTVL: max(1, LOST_S // _ASKS),
        socket.TCP_KEEPCNT: _ASKS,
        # The same limit for bytes that were sent and not acknowledged. Until then, the kernel asks nothing.
        socket.TCP_USER_TIMEOUT: 1000 * LOST_S,
    }
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _connections_to(port: int) -> Iterator[socket.socket]:
    """Yields this process's connections to a port of any machine. torch does not expose a store's descriptor."""
    for path in _OPEN_FILES.iterdir():
        with suppress(OSError):  # another thread may close it meanwhile
            if not str(path.readlink()).startswith("socket:"):
                continue
            # Without SOCK_NONBLOCK, ``socket.setdefaulttimeout`` would change the flags of the process's own socket.
            kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
            with socket.socket(socket.AF_INET6, kind, 0, os.dup(int(path.name))) as found:
                if _is_connection_to(port, found):
                    yield found


def _is_connection_to(port: int, found: socket.socket) -> bool:
    is_tcp = (
        found.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) in (socket.AF_INET, socket.AF_INET6)
        and found.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP
    )
    return is_tcp and found.getpeername()[1] == port
