"""The driver's end of the agents on the nodes of a cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_safe_workers.driver.node_agent import NodeAgent, NodePlace
from rl_safe_workers.driver.nodes import NODE_AGENTS, Node, await_nodes
from rl_safe_workers.errors import ClusterError

logger = logging.getLogger(__name__)


class NodeAgents:
    """One on each node of the run."""

    def __init__(self, nodes: Sequence[Node], run_id: str, *, kill_after_s: float) -> None:
        """Starts them, and does not wait for any."""
        self._nodes = list(nodes)
        self._handles: list[Any] = [
            ray.remote(NodeAgent)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False))
            .remote(run_id, node.id, kill_after_s=kill_after_s)
            for node in nodes
        ]

    def open(self, *, timeout_s: float, check: Callable[[], None]) -> dict[str, NodePlace]:
        """Returns what actors are told of their node, by the node's id.

        Args:
            timeout_s: Seconds until all must have answered.
            check: Called several times a second; what it raises ends the wait.

        Raises:
            ClusterError: If an agent fails.
            PhaseTimeoutError: Names the nodes that have not answered.
        """
        refs = {handle.open.remote(node.address): node for handle, node in zip(self._handles, self._nodes, strict=True)}
        await_nodes(refs, NODE_AGENTS, timeout_s=timeout_s, check=check)
        places = {}
        for ref, node in refs.items():
            try:
                places[node.id] = ray.get(ref)
            except RayError as error:
                raise ClusterError(f"the agent on node {node} failed: {error}") from error
        return places

    def note_processes(self) -> None:
        """Lets each remember who belongs to the run on its node; waits for none."""
        for handle in self._handles:
            handle.note_processes.remote()

    def close(self, *, timeout_s: float, lost: Sequence[Node] = ()) -> None:
        """Lets each end what is left on its node. What one that does not answer leaves, its guardian ends.

        Args:
            timeout_s: Seconds until all must have done so.
            lost: Nodes that are gone, and are not waited for.
        """
        gone = {node.id for node in lost}
        refs = {
            handle.close.remote(): node
            for handle, node in zip(self._handles, self._nodes, strict=True)
            if node.id not in gone
        }
        _, pending = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
        for ref, node in refs.items():
            if ref in pending:
                logger.warning("node %s has not said within %.0f s that nothing is left on it", node, timeout_s)
                continue
            try:
                ray.get(ref)
            except RayError as error:
                logger.warning("node %s: its agent is gone: %s", node, (str(error).splitlines() or [""])[0])
        for handle in self._handles:
            ray.kill(handle, no_restart=True)
