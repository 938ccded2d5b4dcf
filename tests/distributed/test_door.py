"""The door of the run's store: shut, it lets no new connection in, and those that exist go on."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.door import Door, _connected_users, _plain, _read_peer
from rl_safe_workers.worlds.store import connect_store, serve_store

PATIENCE = timedelta(seconds=20)
HASTE = timedelta(seconds=1.5)
Served = tuple[TCPStore, StoreAddress, Door]

STRANGER = """
import encodings.idna, os, socket, sys
os.setgid(65534), os.setuid(65534)
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def served() -> Served:
    return serve_store("127.0.0.1", timeout=PATIENCE)


def test_a_shut_door_keeps_new_connections_out(served: Served) -> None:
    store, address, door = served
    early = connect_store(address, timeout=PATIENCE)
    door.shut()
    with pytest.raises(CommunicatorError, match="no store at 127.0.0.1"):
        connect_store(address, timeout=HASTE)
    early.set("key", "value")
    assert store.get("key") == b"value"


def test_an_opened_door_lets_those_in_who_wait(served: Served) -> None:
    _, address, door = served
    door.shut()
    threading.Timer(1.0, door.open).start()
    connect_store(address, timeout=PATIENCE).set("key", "value")


def test_a_door_is_shut_again_after_its_use(served: Served) -> None:
    _, address, door = served
    door.shut()
    with door.opened():
        connect_store(address, timeout=PATIENCE)
    with pytest.raises(CommunicatorError):
        connect_store(address, timeout=HASTE)
    door.open()
    door.open()
    connect_store(address, timeout=PATIENCE)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_who_is_in_already_is_named(served: Served) -> None:
    _, address, door = served
    with subprocess.Popen(
        [sys.executable, "-c", STRANGER, str(address.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "connected\n"
        with pytest.raises(CommunicatorError, match=rf"user 65534 .* the run's store at 127.0.0.1:{address.port}"):
            door.shut()
        stranger.communicate("")


BYSTANDER = """
import encodings.idna, os, socket, sys
os.setgid(65534), os.setuid(65534)
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
print("accepted", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_port_of_another_address_is_not_the_stores(served: Served) -> None:
    _, address, door = served
    with (
        subprocess.Popen(
            [sys.executable, "-c", BYSTANDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as bystander,
        socket.socket() as client,
    ):
        assert bystander.stdout is not None
        client.bind(("127.0.0.2", address.port))
        client.connect(("127.0.0.1", int(bystander.stdout.readline())))
        assert bystander.stdout.readline() == "accepted\n"
        door.shut()
        bystander.communicate("")


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("0100007F:1F90", ("127.0.0.1", 8080)),
        ("0000000000000000FFFF00000100007F:1F90", ("127.0.0.1", 8080)),
        ("00000000000000000000000001000000:FFFF", ("::1", 65535)),
        ("B80D01200000000067452301EFCDAB89:0050", ("2001:db8::123:4567:89ab:cdef", 80)),
    ],
)
@pytest.mark.skipif(sys.byteorder != "little", reason="the kernel prints numbers of the machine")
def test_addresses_of_the_kernels_tables_are_read(text: str, peer: tuple[str, int]) -> None:
    address, port = _read_peer(text)
    assert (str(address), port) == peer


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_a_connection_to_a_door_of_any_family_is_found(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener, socket.socket(family) as client:
        listener.bind((host, 0))
        listener.listen()
        address = _plain(ipaddress.ip_address(host))
        port = listener.getsockname()[1]
        assert _connected_users(address, port) == set()
        client.connect((host, port))
        assert _connected_users(address, port) == {os.getuid()}


def test_a_port_of_another_interface_stays_open() -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        Door(listener.dup()).shut()
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 1).close()
