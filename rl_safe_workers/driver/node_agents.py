"""The driver's end of the agents on the nodes of a cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_safe_workers.diagnostics.inquiry import Answers
from rl_safe_workers.driver.node_agent import NodeAgent, NodePlace
from rl_safe_workers.driver.nodes import NODE_AGENTS, Node, await_nodes
from rl_safe_workers.errors import ClusterError, first_line

logger = logging.getLogger(__name__)


class NodeAgents:
    """One on each node of the run."""

    def __init__(self, nodes: Sequence[Node], run_id: str, *, kill_after_s: float) -> None:
        """Starts them, and does not wait for any."""
        self._nodes = list(nodes)
        agent = ray.remote(NodeAgent)
        self._handles: list[Any] = [
            agent.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
                run_id, node.id, kill_after_s=kill_after_s
            )
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

    def ask_ranks(self, *, timeout_s: float) -> Answers:
        """Lets each ask the ranks of its node where they are; all at once.

        Args:
            timeout_s: Seconds until all must have answered. Nodes that have not are named in what is returned.
        """
        # What a node has found out counts, though one of its actors does not answer: it gets less time than there is.
        refs = {
            handle.ask_ranks.remote(0.8 * timeout_s): node
            for handle, node in zip(self._handles, self._nodes, strict=True)
        }
        ready, pending = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        told, more, silent = [], [], [refs[ref] for ref in pending]
        for ref in ready:
            try:
                answers, flights = ray.get(ref)
            except RayError as error:
                logger.warning("node %s cannot be asked: %s", refs[ref], first_line(error))
                silent.append(refs[ref])
                continue
            told.append(answers)
            more.append(partial(ray.get, flights))
        return Answers(
            ranks=sorted((rank for one in told for rank in one.ranks), key=lambda rank: rank.rank_id),
            records={rank: record for one in told for rank, record in one.records.items()},
            last_places={rank: place for one in told for rank, place in one.last_places.items()},
            more_flights=more,
            silent=[str(node) for node in self._nodes if node in silent],
        )

    def keep_logs(self, target: Path, *, timeout_s: float, lost: Sequence[Node] = ()) -> None:
        """Writes the end of what the run's processes have printed to ``<target>/<address of the node>/``.

        Args:
            target: A folder.
            timeout_s: Seconds in which the nodes are waited for.
            lost: Nodes that are gone, and are not asked.
        """
        pending = {handle.logs.remote(): node for handle, node in self._without(lost)}
        deadline = time.monotonic() + timeout_s
        while pending and (left_s := deadline - time.monotonic()) > 0:
            ready, _ = ray.wait(list(pending), timeout=left_s)
            for ref in ready:
                node = pending.pop(ref)
                try:
                    files = ray.get(ref)
                except RayError as error:
                    logger.warning("node %s gives no logs: %s", node, first_line(error))
                    continue
                folder = target / node.address
                folder.mkdir(parents=True, exist_ok=True)
                for name, contents in files.items():
                    (folder / name).write_bytes(contents)
        if pending:
            logger.warning("no logs within %.0f s from node %s", timeout_s, ", ".join(map(str, pending.values())))

    def close(self, *, timeout_s: float, lost: Sequence[Node] = ()) -> None:
        """Lets each end what is left on its node. What one that does not answer leaves, its guardian ends.

        Args:
            timeout_s: Seconds until all must have done so.
            lost: Nodes that are gone, and are not waited for.
        """
        refs = {handle.close.remote(): node for handle, node in self._without(lost)}
        _, pending = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
        for ref, node in refs.items():
            if ref in pending:
                logger.warning("node %s has not said within %.0f s that nothing is left on it", node, timeout_s)
                continue
            try:
                ray.get(ref)
            except RayError as error:
                logger.warning("node %s: its agent is gone: %s", node, first_line(error))
        for handle in self._handles:
            ray.kill(handle, no_restart=True)

    def _without(self, lost: Sequence[Node]) -> list[tuple[Any, Node]]:
        gone = {node.id for node in lost}
        return [pair for pair in zip(self._handles, self._nodes, strict=True) if pair[1].id not in gone]
