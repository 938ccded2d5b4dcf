"""Calls the agents on the nodes of a cluster, from the driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_safe_workers.diagnostics.inquiry import Answers
from rl_safe_workers.diagnostics.stopped import Stop
from rl_safe_workers.driver.cluster.node_agent import NodeAgent, NodePlace
from rl_safe_workers.driver.cluster.nodes import NODE_AGENTS, Node, await_nodes
from rl_safe_workers.errors import ClusterError, first_line
from rl_safe_workers.ranks import RankId

logger = logging.getLogger(__name__)


class NodeAgents:
    """The agents of a run, one on each node."""

    def __init__(self, nodes: Sequence[Node], run_id: str, *, kill_after_s: float, stop_limit_s: float) -> None:
        """Starts the agents, without waiting for them. Arguments as for `NodeAgent`."""
        self._nodes = list(nodes)
        agent = ray.remote(NodeAgent)
        self._handles: list[Any] = [
            agent.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
                run_id, node.id, kill_after_s=kill_after_s, stop_limit_s=stop_limit_s
            )
            for node in nodes
        ]

    def open(self, *, timeout_s: float, check: Callable[[], None]) -> dict[str, NodePlace]:
        """Returns the folders and the interface for the actors of each node, by the node's id.

        Args:
            timeout_s: Seconds until all agents must have answered.
            check: Called several times a second. An exception that it raises ends the wait.

        Raises:
            ClusterError: If an agent fails.
            PhaseTimeoutError: If an agent does not answer in time. It names the nodes.
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
        """Makes each agent record the run's processes on its node, without waiting."""
        for handle in self._handles:
            handle.note_processes.remote()

    def ask_ranks(self, *, timeout_s: float) -> Answers:
        """Makes all agents at once ask the ranks of their nodes for their line of code.

        Args:
            timeout_s: Seconds until all agents must have answered. The result names the nodes that did not.
        """
        # An agent gets less time than we wait, so that its findings arrive even if one of its actors does not answer.
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
        silent_nodes = [str(node) for node in self._nodes if node in silent]
        return replace(Answers.of_nodes(told), more_flights=more, silent=silent_nodes)

    def stops(self, *, timeout_s: float) -> list[Stop]:
        """Returns the records of stopped processes that the watches on all nodes have ended. Skips silent nodes.

        Args:
            timeout_s: Longest wait for all nodes, in seconds.
        """
        refs = {handle.stops.remote(): node for handle, node in zip(self._handles, self._nodes, strict=True)}
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        found = []
        for ref in ready:
            try:
                found += ray.get(ref)
            except RayError as error:
                logger.warning("node %s does not tell who was stopped: %s", refs[ref], first_line(error))
        return found

    def end_rank(self, node: Node, rank_id: RankId, *, timeout_s: float) -> list[str]:
        """Makes the agent on a node end a rank there; see `node_agent.end_rank_here`.

        Args:
            node: A node of the run.
            rank_id: The rank.
            timeout_s: Longest wait for the agent's answer, in seconds.

        Raises:
            ClusterError: If the agent fails, or does not answer in time.
        """
        (handle,) = [handle for handle, of in zip(self._handles, self._nodes, strict=True) if of.id == node.id]
        try:
            left: list[str] = ray.get(handle.end_rank.remote(rank_id), timeout=timeout_s)
        except RayError as error:
            raise ClusterError(f"the agent on node {node} cannot end {rank_id}: {first_line(error)}") from error
        return left

    def keep_logs(self, target: Path, *, timeout_s: float, lost: Sequence[Node] = ()) -> None:
        """Writes the end of the output of the run's processes to ``<target>/<address of the node>/``.

        Args:
            target: A folder.
            timeout_s: Longest wait for all nodes, in seconds.
            lost: Nodes that are gone. They are not asked.
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
        """Makes each agent end the run's processes on its node. If an agent does not answer, its guardian ends them.

        Args:
            timeout_s: Seconds until all agents must have finished.
            lost: Nodes that are gone. They are not waited for.
        """
        refs = {handle.close.remote(): node for handle, node in self._without(lost)}
        _, pending = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s) if refs else ([], [])
        for ref, node in refs.items():
            if ref in pending:
                logger.warning("node %s has not confirmed within %.0f s that no process is left on it", node, timeout_s)
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
