"""Manages the files and processes of a run on one node of a cluster that it has joined.

If the run starts its own Ray, there is no agent: the driver does this work itself.
"""

from __future__ import annotations

import ipaddress
import shutil
import socket
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray

from rl_safe_workers import env
from rl_safe_workers.compat.ray_tables import logs_folder
from rl_safe_workers.diagnostics.inquiry import Answers, ask_ranks, processes_of_run
from rl_safe_workers.diagnostics.stopped import MachineWatch, Stop, forget_stops, read_stops
from rl_safe_workers.driver.cluster.actors import CALL_FRAME
from rl_safe_workers.ranks import RankId
from rl_safe_workers.reaping.guardian import Guardian
from rl_safe_workers.reaping.ipc_files import Moment, remove_ipc_files, segments_of
from rl_safe_workers.reaping.processes import (
    end_rank,
    ended,
    make_run_folder,
    rank_processes,
    reap,
    remove_leftovers,
    run_processes,
)

LOG_BYTES = 2**18
"""Largest number of bytes that a failed run copies from the end of a log file on a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """The folders and the interface for the actors of a node.

    Example: ``ray.get(agent.open.remote("10.0.0.4"))``
    """

    temp_dir: Path
    """Folder for the actors' temporary files; the agent removes it."""
    hang_dir: Path
    """Folder for the diagnostics that actors write when they are asked."""
    interface: str | None
    """The network interface for gloo; None if the node's owner has set none and no interface has the node's address."""


class NodeAgent:
    """A Ray actor without resources, one on each node of the run.

    It does not carry the run's mark, because it ends all processes that do. If the agent itself is killed, its guardian
    ends them: Ray kills the agent when the driver dies or when the node leaves the cluster.
    """

    def __init__(self, run_id: str, node_id: str, *, kill_after_s: float, stop_limit_s: float) -> None:
        """Starts the guardian, and the watch for stopped processes.

        Args:
            run_id: Marks the run's processes.
            node_id: Ray's id of this node; marks them, too.
            kill_after_s: Seconds between asking a process to end and killing it.
            stop_limit_s: Seconds after which a stopped process is ended; 0: none is watched.
        """
        self._run_id, self._node_id, self._kill_after_s = run_id, node_id, kill_after_s
        self._since, self._pids = Moment.now(), set[int]()
        self._guardian = Guardian(run_id, since=self._since, kill_after_s=kill_after_s, node=node_id)
        remove_leftovers(Path(tempfile.gettempdir()))
        self._temp_dir = make_run_folder(run_id)
        self._guardian.tell(folders=[self._temp_dir])
        self._hang_dir = self._temp_dir / "hang"
        self._watch = MachineWatch(run_id, self._hang_dir, stop_limit_s, node=node_id)

    def open(self, address: str) -> NodePlace:
        """Makes the folders.

        Args:
            address: Address of the node in the cluster.
        """
        self._hang_dir.mkdir(mode=0o700, exist_ok=True)
        # A choice of the node's owner is in this process's environment, which the actors share.
        interface = env.gloo_interface() or interface_of(address)
        return NodePlace(temp_dir=self._temp_dir, hang_dir=self._hang_dir, interface=interface)

    def note_processes(self) -> None:
        """Records the run's processes on this node for `close`; see `driver.cluster.cluster.Cluster.note_processes`."""
        self._pids |= {process.pid for process in run_processes(self._run_id, self._node_id)}
        self._guardian.tell(pids=self._pids)

    def ask_ranks(self, patience_s: float) -> tuple[Answers, Any]:
        """Asks the run's ranks on this node for their line of code; see `diagnostics.inquiry.ask_ranks`.

        Args:
            patience_s: Longest wait in seconds.

        Returns:
            The answers without the Flight Recorder's files, and a Ray reference to these files.
        """
        answers = ask_ranks(
            lambda: processes_of_run(self._run_id, self._node_id),
            patience_s=patience_s,
            folder=self._hang_dir,
            call_frame=CALL_FRAME,
        )
        return replace(answers, flights={}), ray.put(answers.flights)

    def stops(self) -> list[Stop]:
        """Returns the records of stopped processes that the watch on this node has ended."""
        return read_stops(self._hang_dir)

    def end_rank(self, rank_id: RankId) -> list[str]:
        """Ends a rank of the run on this node; see `end_rank_here`."""
        return end_rank_here(
            self._run_id, rank_id, since=self._since, hang_dir=self._hang_dir, timeout_s=self._kill_after_s
        )

    def logs(self) -> dict[str, bytes]:
        """Returns the end of the output of each process of the run on this node, by the name of Ray's log file."""
        self.note_processes()
        folder = logs_folder()
        assert folder is not None, "an actor has a node"
        files = [
            file for pid in self._pids for kind in ("out", "err") for file in folder.glob(f"worker-*-{pid}.{kind}")
        ]
        return {file.name: tail for file in files if (tail := _tail(file))}

    def close(self) -> None:
        """Ends all processes of the run on this node, and removes its files."""
        self._watch.close()
        self._pids |= {process.pid for process in run_processes(self._run_id, self._node_id)}
        segments = segments_of(self._pids)
        reap(self._run_id, kill_after_s=self._kill_after_s, node=self._node_id)
        remove_ipc_files(ended(self._pids), since=self._since, segments=segments)
        shutil.rmtree(self._temp_dir, ignore_errors=True)
        self._guardian.dismiss(timeout_s=self._kill_after_s)


def end_rank_here(run_id: str, rank_id: RankId, *, since: Moment, hang_dir: Path | None, timeout_s: float) -> list[str]:
    """Kills the processes of a rank on this machine, and removes their files in shared memory.

    Args:
        run_id: Id of the run.
        rank_id: The rank. Another process may take its place then, so its stops are forgotten.
        since: A moment before its processes began.
        hang_dir: The folder with the records of stopped processes; None if the run has no such folder.
        timeout_s: Longest wait for the end of the processes.

    Returns:
        The processes that have not ended in time. Their files stay.
    """
    pids = {process.pid for process in rank_processes(run_id, rank_id)}
    segments = segments_of(pids)
    if left := end_rank(run_id, rank_id, timeout_s=timeout_s):
        return [str(process) for process in left]
    remove_ipc_files(ended(pids), since=since, segments=segments)
    if hang_dir is not None:
        forget_stops(hang_dir, rank_id)
    return []


def _tail(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - LOG_BYTES))
        return opened.read()


def interface_of(address: str) -> str | None:
    """Returns the name of the interface that has an address; None if none has it.

    Every loopback address belongs to the loopback interface.

    >>> interface_of("127.0.0.3")
    'lo'
    """
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for of_interface in addresses:
            if of_interface.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            own = ipaddress.ip_address(of_interface.address.partition("%")[0])
            if own == wanted or (own.is_loopback and wanted.is_loopback):
                return str(name)
    return None
