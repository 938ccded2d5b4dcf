"""Nodes of a cluster: their order, what they must have in common, and who is lost."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.driver.cluster import node_probe, nodes
from rl_safe_workers.driver.cluster.node_agent import interface_of
from rl_safe_workers.driver.cluster.node_check import compare, marker
from rl_safe_workers.driver.cluster.nodes import Node, _order, living_nodes, lost_among
from rl_safe_workers.errors import ConfigError

CODE = "0123456789ab"


def node(address: str, port: int = 1, name: str = "") -> Node:
    return Node(id=address, name=name or address, address=address, port=port, total={}, free={})


def facts(*, code: str | None = CODE, paths: tuple[str, ...] = (), **versions: str) -> Mapping[str, Any]:
    return {"versions": {"Python": "3.11", "torch": "2.13.0", **versions}, "code": code, "paths": list(paths)}


def test_ranks_follow_addresses_by_number() -> None:
    addresses = ["10.0.0.10", "10.0.0.9", "rack2-node10", "rack2-node9", "9.0.0.1"]
    ordered = [n.address for n in sorted(map(node, addresses), key=_order)]
    assert ordered == ["9.0.0.1", "10.0.0.9", "10.0.0.10", "rack2-node9", "rack2-node10"]


def test_a_node_is_called_by_its_name_and_address() -> None:
    assert str(node("10.0.0.1")) == "10.0.0.1"
    assert str(node("10.0.0.1", name="rack1")) == "rack1 (10.0.0.1)"


def test_a_node_that_takes_no_connection_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there, gone = node("127.0.0.1", listener.getsockname()[1]), node("127.0.0.1", 1)
        assert lost_among([there, gone]) == [gone]


def listed(number: str, port: int) -> dict[str, Any]:
    """A node at 127.0.0.1 as Ray lists it."""
    place = {"NodeName": "127.0.0.1", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
    return {"NodeID": number, "Alive": True, "Resources": {"CPU": 1.0}, **place}


def test_a_lost_node_that_ray_still_lists_changes_no_name_of_a_living_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setattr(nodes, "free_resources", dict)
        monkeypatch.setattr(nodes.ray, "nodes", lambda: [listed("lost", 1), listed("new", port)])
        assert [(found.id, str(found)) for found in living_nodes()] == [("new", "127.0.0.1")]
        monkeypatch.setattr(nodes.ray, "nodes", lambda: [listed("first", port), listed("other", port)])
        assert [str(found) for found in living_nodes()] == [
            "127.0.0.1, first (127.0.0.1)",
            "127.0.0.1, other (127.0.0.1)",
        ]


def test_nodes_alike_go_together() -> None:
    assert compare({"a": facts(), "b": facts()}, code=CODE) == []


@pytest.mark.parametrize(
    ("odd", "complaint"),
    [
        (facts(code=None), "c has no rl_safe_workers (install the wheel there, or submit"),
        (facts(code="ffff"), f"c runs other code of rl_safe_workers (ffff, the driver {CODE})"),
        (facts(torch="2.12.0"), "c has torch 2.12.0, most have torch 2.13.0"),
        (facts(vllm="0.25.1"), "c has vllm 0.25.1, most have no vllm"),
        (facts(Python="3.12"), "c has Python 3.12, most have Python 3.11"),
        (facts(paths=("/models/m",)), "c does not see /models/m (put it on storage that all nodes share)"),
    ],
)
def test_the_node_that_differs_is_named_and_in_what(odd: Mapping[str, Any], complaint: str) -> None:
    (found,) = compare({"a": facts(), "b": facts(), "c": odd}, code=CODE)
    assert found.startswith(complaint)


def test_all_that_is_wrong_is_said_at_once() -> None:
    complaints = compare({"a": facts(torch="2.12.0", code="ffff"), "b": facts(), "c": facts(code=None)}, code=CODE)
    assert [text.split()[0] for text in complaints] == ["a", "c"]
    assert "other code" in complaints[0]
    assert "torch 2.12.0" in complaints[0]


def test_the_code_is_told_from_any_other(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    here = node_probe.fingerprint()
    assert here is not None
    assert len(here) == 12
    package = tmp_path / "rl_safe_workers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "rl_safe_workers")
    assert node_probe.fingerprint() not in (None, here)


def test_a_probe_tells_what_is_missing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    found = node_probe.look(["psutil", "no-such-distribution"], [str(tmp_path), str(tmp_path / "x")])
    assert set(found["versions"]) == {"Python", "psutil"}
    assert found["paths"] == [str(tmp_path / "x")]


def test_a_marker_that_cannot_be_made_is_an_error_of_ours() -> None:
    with (
        pytest.raises(ConfigError, match="^trainer.default_local_dir=/proc/x/y: .*storage that all nodes share"),
        marker(Path("/proc/x/y")),
    ):
        pass


def test_what_a_killed_driver_has_left_of_markers_goes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with marker(tmp_path) as file:
        left = tmp_path / f"{file.name}x"
        left.write_text("")
    two_days_ago = time.time() - 2 * 86400
    os.utime(left, (two_days_ago, two_days_ago))
    with marker(tmp_path):
        assert not left.exists()


def test_two_drivers_leave_each_other_s_markers_alone(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with marker(tmp_path) as first:
        with marker(tmp_path) as second:
            assert first.exists()
            assert second.exists()
            second.unlink()  # by somebody else
        assert first.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_marker_is_there_while_it_is_needed(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with marker(tmp_path / "checkpoints") as file:
        assert file.exists()
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.7") == "lo"
    assert interface_of("192.0.2.199") is None
    assert interface_of("no-address") is None
