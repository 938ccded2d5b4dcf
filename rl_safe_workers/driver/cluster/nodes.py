"""Lists the nodes of a Ray cluster in the order of ranks, and finds the nodes that do not answer."""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ray

from rl_safe_workers.compat.ray_tables import free_resources
from rl_safe_workers.driver.cluster.interrupts import SLICE_S
from rl_safe_workers.errors import Awaited, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase

JOINING, LOOK_AT_NODES, NODE_AGENTS = "joining the Ray cluster", "the look at the nodes", "the agents of the nodes"
"""Names in a PhaseTimeoutError for waits that are not for ranks."""
ANSWER_S = 2.0
"""Seconds for a node's raylet to accept a connection. After two such timeouts the node counts as lost."""
_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, as in Ray's directory.

    Example: ``Node(id="9d29...", name="10.0.0.4", address="10.0.0.4", port=39231, total={"GPU": 8.0}, free={...})``
    """

    id: str
    name: str
    """The name from ``ray start --node-name``; by default the address."""
    address: str
    port: int
    """Port of the node's raylet."""
    total: Mapping[str, float]
    """Amount of each resource, by Ray's name of the resource."""
    free: Mapping[str, float]
    """Amount of each resource that nobody has reserved. Ray's answer is some hundred milliseconds old."""

    def __str__(self) -> str:
        return self.name if self.name == self.address else f"{self.name} ({self.address})"

    @property
    def is_loopback(self) -> bool:
        """True for the node of a Ray that was started for one run."""
        return self.address == "127.0.0.1"

    def answers(self) -> bool:
        """Returns True if the node's raylet accepts a connection. Ray itself notices a loss 15 to 30 s later."""
        for _ in range(2):  # a busy raylet may miss the first attempt
            try:
                with socket.create_connection((self.address, self.port), timeout=ANSWER_S):
                    return True
            except OSError:
                continue
        return False


def living_nodes() -> list[Node]:
    """Returns the nodes that answer, sorted by address, which often is their order in the rack.

    For some seconds, Ray also lists a lost node. A new node may already have its address and its name.
    """
    free = free_resources()
    nodes = [_node(of_ray, free.get(of_ray["NodeID"], {})) for of_ray in ray.nodes() if of_ray["Alive"]]
    if len(nodes) > 1:  # the only node is alive: this process has just talked to its Ray
        lost = {node.id for node in lost_among(nodes)}
        nodes = [node for node in nodes if node.id not in lost]
    names = Counter(str(node) for node in nodes)
    # Several nodes on one machine share a name. Messages must tell them apart.
    unique = [node if names[str(node)] == 1 else replace(node, name=f"{node.name}, {node.id[:8]}") for node in nodes]
    return sorted(unique, key=_order)


def lost_among(nodes: Sequence[Node]) -> list[Node]:
    """Returns the nodes that do not answer. Blocks for little more than twice ``ANSWER_S``."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [node for node, answers in zip(nodes, pool.map(Node.answers, nodes), strict=True) if not answers]


def await_nodes(refs: Mapping[Any, Node], what: str, *, timeout_s: float, check: Callable[[], None]) -> None:
    """Waits for one result from each node.

    Args:
        refs: Ray's reference to each result, with its node.
        what: Name of the wait in the error, e.g. ``NODE_AGENTS``.
        timeout_s: Seconds until all results must be there.
        check: Called several times a second. An exception that it raises ends the wait.

    Raises:
        PhaseTimeoutError: If a result is not there in time. It names the nodes.
    """
    deadline, pending = time.monotonic() + timeout_s, list(refs)
    while pending:
        check()
        is_over = time.monotonic() >= deadline
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=0 if is_over else SLICE_S)
        if pending and is_over:
            names = ", ".join(str(refs[ref]) for ref in pending)
            raise PhaseTimeoutError(
                phase=Phase.START,
                awaited=Awaited(what),
                waited_s=timeout_s,
                setting="rl_safe.timeouts.start",
                detail=f"no answer from {names}",
            )


def _node(of_ray: Mapping[str, Any], free: Mapping[str, float]) -> Node:
    return Node(
        id=of_ray["NodeID"],
        name=of_ray["NodeName"],
        address=of_ray["NodeManagerAddress"],
        port=of_ray["NodeManagerPort"],
        total=of_ray["Resources"],
        free=free,
    )


def _order(node: Node) -> tuple[int, int, list[int | str], str]:
    """Returns the sort key of a node: IP addresses by number, then host names, with the numbers in them by value."""
    try:
        address = ipaddress.ip_address(node.address)
    except ValueError:
        parts = re.split(r"(\d+)", node.address)
        # Text and digits alternate, so that Python compares only equal types.
        return 9, 0, [int(part) if part.isdecimal() else part for part in parts], node.id
    return address.version, int(address), [], node.id
