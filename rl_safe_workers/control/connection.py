"""Connections to the run's store that end if the machine of its owner is gone.

A machine that loses its power or its network closes no connection. torch's client then waits for an answer without end,
whatever its timeout (seen with torch 2.13). The kernel can find out: it asks the other machine from time to time
(tcp(7), ``SO_KEEPALIVE``). A process that is stopped does not answer either, but the kernel of its machine does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

LOST_S = 60
"""Seconds without an answer of the other machine after which its connections end."""
_ASKS = 6
"""Number of questions in this time."""
_OPEN_FILES = Path("/proc/self/fd")
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


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

    Has no effect on a store without connections, such as a ``FileStore``, and none where there is no ``/proc``.
    """
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, TCPStore):
        return
    options = {
        socket.TCP_KEEPIDLE: max(1, LOST_S // _ASKS),
        socket.TCP_KEEPINTVL: max(1, LOST_S // _ASKS),
        socket.TCP_KEEPCNT: _ASKS,
        # The same limit for bytes that were sent and not acknowledged: until then, the kernel asks nothing.
        socket.TCP_USER_TIMEOUT: 1000 * LOST_S,
    }
    for connection in _connections_to(inner.port):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in options.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _connections_to(port: int) -> Iterator[socket.socket]:
    """Yields this process's connections to a port of any machine. torch does not tell the descriptor of a store."""
    for path in _OPEN_FILES.iterdir() if _OPEN_FILES.is_dir() else ():
        with suppress(OSError):  # another thread may close it meanwhile
            if not path.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as found:
                if found.family in _FAMILIES and found.getpeername()[1] == port:
                    yield found
