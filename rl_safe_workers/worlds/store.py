"""The rendezvous store of a run: a TCPStore owned by training rank 0."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import DistNetworkError, TCPStore

from rl_safe_workers.control.connection import end_if_lost
from rl_safe_workers.control.seal import new_secret
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.door import Door


def serve_store(host: str, *, timeout: timedelta) -> tuple[TCPStore, StoreAddress, Door]:
    """Starts the store server in this process, on a free port of one interface only.

    Args:
        host: Address to listen on; TCPStore by itself would listen on every interface.
        timeout: How long this client's own ``get`` and ``wait`` block by default.

    Returns:
        The server's store, its address with a new secret, and the door of its port, which is open. The server lives as
        long as the store object.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    door = Door(listener.dup())
    # The store takes over the descriptor, so the Python socket must not close it.
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )
    return store, StoreAddress(host=host, port=port, secret=new_secret()), door


def connect_store(address: StoreAddress, *, timeout: timedelta) -> TCPStore:
    """Connects to the store of another process.

    Args:
        address: Where the store listens.
        timeout: Longest wait for the connection, and how long ``get`` and ``wait`` block by default.

    Raises:
        CommunicatorError: If there is no connection within ``timeout``.
    """
    try:
        store = TCPStore(address.host, address.port, is_master=False, wait_for_workers=False, timeout=timeout)
    except DistNetworkError as error:
        raise CommunicatorError(
            f"no store at {address.host}:{address.port} within {timeout.total_seconds():.0f} s: "
            "training rank 0, which serves it, has ended or cannot be reached from this host"
        ) from error
    end_if_lost(store)
    return store
