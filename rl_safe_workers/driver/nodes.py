"""The nodes of a Ray cluster, in the order that ranks follow."""

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
from rl_safe_workers.driver.interrupts import SLICE_S
from rl_safe_workers.errors import Awaited, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase

JOINING, LOOK_AT_NODES, NODE_AGENTS = "joining the Ray cluster", "the look at the nodes", "the agents of the nodes"
"""Names that a PhaseTimeoutError gives to waits for others than ranks."""
ANSWER_S = 2.0
"""How long a node's own port may take to accept a connection before the node counts as lost."""
_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, as Ray's directory has it.

    Example: ``Node(id="9d29...", name="10.0.0.4", address="10.0.0.4", port=39231, total={"GPU": 8.0}, free={...})``
    """

    id: str
    name: str
    """As given to ``ray start --node-name``, by default its address."""
    address: str
    port: int
    """Port of its raylet."""
    total: Mapping[str, float]
    free: Mapping[str, float]
    """Resources that nobody has reserved; Ray tells with a delay of some hundred milliseconds."""

    def __str__(self) -> str:
        return self.name if self.name == self.address else f"{self.name} ({self.address})"

    @property
    def is_loopback(self) -> bool:
        """True if it is the one of a Ray that was started for the run alone."""
        return self.address == "127.0.0.1"

    def answers(self) -> bool:
        """Returns True if its raylet takes a connection. Ray itself notices some 15 to 30 s later that one does not."""
        for _ in range(2):  # a busy one may miss the first
            try:
                with socket.create_connection((self.address, self.port), timeout=ANSWER_S):
                    return True
            except OSError:
                continue
        return False


def living_nodes() -> list[Node]:
    """Returns the nodes that Ray takes for alive, by address: the order of a rack, where addresses are given in it."""
    free = free_resources()
    nodes = [_node(of_ray, free.get(of_ray["NodeID"], {})) for of_ray in ray.nodes() if of_ray["Alive"]]
    names = Counter(str(node) for node in nodes)
    # Several on one machine share a name, and what is said of one must not pass for another's.
    unique = [node if names[str(node)] == 1 else replace(node, name=f"{node.name}, {node.id[:8]}") for node in nodes]
    return sorted(unique, key=_order)


def lost_among(nodes: Sequence[Node]) -> list[Node]:
    """Returns those that do not answer. Blocks for little more than twice ``ANSWER_S``."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [node for node, answers in zip(nodes, pool.map(Node.answers, nodes), strict=True) if not answers]


def await_nodes(refs: Mapping[Any, Node], what: str, *, timeout_s: float, check: Callable[[], None]) -> None:
    """Waits for something of each node.

    Args:
        refs: Ray references of the awaited results, each with its node.
        what: For the error, e.g. ``NODE_AGENTS``.
        timeout_s: Seconds until all must be there.
        check: Called several times a second; what it raises ends the wait.

    Raises:
        PhaseTimeoutError: Names the nodes that have not answered.
    """
    deadline, pending = time.monotonic() + timeout_s, list(refs)
    while pending:
        check()
        is_over = time.monotonic() >= deadline
        _, pending = ray.wait(pending, num_returns=len(pending), timeout=0 if is_over else SLICE_S)
        if pending and is_over:
            names = ", ".join(str(refs[ref]) for ref in pending)
            raise PhaseTimeoutError(
                phase=Phase.START, awaited=Awaited(what), waited_s=timeout_s,
                setting="rl_safe.timeouts.start", detail=f"no answer from {names}",
            )  # fmt: skip


def _node(of_ray: Mapping[str, Any], free: Mapping[str, float]) -> Node:
    return Node(
        id=of_ray["NodeID"], name=of_ray["NodeName"], address=of_ray["NodeManagerAddress"],
        port=of_ray["NodeManagerPort"], total=of_ray["Resources"], free=free,
    )  # fmt: skip


def _order(node: Node) -> tuple[int, int, list[int | str], str]:
    """Sorts addresses by number; what is no address follows, by name, with numbers in it by value."""
    try:
        address = ipaddress.ip_address(node.address)
    except ValueError:
        parts = re.split(r"(\d+)", node.address)
        # Text and digits take turns, so that equal places hold equal types.
        return 9, 0, [int(part) if part.isdecimal() else part for part in parts], node.id
    return address.version, int(address), [], node.id
