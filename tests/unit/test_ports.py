"""The port of a listener that starts later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rl_safe_workers import ports
from rl_safe_workers.ports import port_to_listen_on


def test_the_port_can_be_listened_on_and_is_not_of_the_outgoing_range() -> None:
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    for _ in range(50):
        port = port_to_listen_on("127.0.0.1")
        assert ports.LOWEST <= port < first_outgoing
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_port_that_somebody_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = port_to_listen_on("127.0.0.1"), port_to_listen_on("127.0.0.1")
    drawn = iter([taken, taken, free])
    monkeypatch.setattr(ports.random, "randrange", lambda *_: next(drawn))
    with socket.create_server(("127.0.0.1", taken)):
        assert port_to_listen_on("127.0.0.1") == free


def test_a_range_from_the_lowest_port_on_leaves_the_choice_to_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outgoing = tmp_path / "range"
    outgoing.write_text("1024\t60999\n", encoding="ascii")
    monkeypatch.setattr(ports, "_OUTGOING", outgoing)
    with socket.create_server(("127.0.0.1", port_to_listen_on("127.0.0.1"))):
        pass


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign"):
        port_to_listen_on("192.0.2.1")
