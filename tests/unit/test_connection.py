"""Connections to the run's store that end when the machine of its owner is gone."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import FileStore, PrefixStore, TCPStore

from rl_safe_workers.control import connection
from rl_safe_workers.control.connection import LOST_S, end_if_lost, own_connection
from rl_safe_workers.worlds.store import serve_store


@pytest.fixture
def store() -> Iterator[TCPStore]:
    served, _, _ = serve_store("127.0.0.1", timeout=timedelta(seconds=20))
    yield served
    del served


def _connections(port: int) -> list[socket.socket]:
    return [socket.socket(fileno=os.dup(found.fileno())) for found in connection._connections_to(port)]


def _limits(found: socket.socket) -> tuple[int, int]:
    return (
        found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    )


def test_every_connection_to_the_store_has_a_limit(store: TCPStore) -> None:
    own = own_connection(PrefixStore("mine", store))
    found = _connections(store.port)
    assert [_limits(each) for each in found] == [(1, 1000 * LOST_S)] * 2
    own.set("key", "value")
    assert store.get("mine/key") == b"value"
    for each in found:
        each.close()


def test_other_sockets_and_their_flags_stay_as_they_are(store: TCPStore) -> None:
    ours, other = socket.socketpair()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, ours, other:
        datagrams.connect(("127.0.0.1", store.port))
        before = set(Path("/proc/self/fd").iterdir())
        socket.setdefaulttimeout(5.0)
        try:
            end_if_lost(store)
        finally:
            socket.setdefaulttimeout(None)
        assert set(Path("/proc/self/fd").iterdir()) == before
        assert all(os.get_blocking(each.fileno()) for each in (ours, other, datagrams))
        assert not datagrams.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_store_without_connections_is_left_alone(tmp_path: Path) -> None:
    end_if_lost(FileStore(str(tmp_path / "store"), 1))


def test_a_kernel_that_refuses_is_logged(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket, "TCP_USER_TIMEOUT", 9999)
    with caplog.at_level(logging.WARNING):
        end_if_lost(store)
    assert "if the machine of the store's owner is lost, this process may wait without end: " in caplog.text
