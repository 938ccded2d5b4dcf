"""Looks after a run's folders, leftovers and surviving processes on one node of a cluster that it has joined.

The driver does all of this itself on its own machine, where it also starts Ray.
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
from ray._private import worker as ray_worker

from rl_safe_workers import env
from rl_safe_workers.diagnostics.inquiry import Answers, ask_ranks, processes_of_run
from rl_safe_workers.driver.actors import CALL_FRAME
from rl_safe_workers.reaping.guardian import Guardian
from rl_safe_workers.reaping.ipc_files import Moment, remove_ipc_files
from rl_safe_workers.reaping.processes import ended, make_run_folder, reap, remove_leftovers, run_processes

LOG_BYTES = 2**18
"""Bytes that a failed run takes from the end of each log file of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """A node's folders and addresses, for its actors. Example: ``ray.get(agent.open.remote("10.0.0.4"))``."""

    temp_dir: Path
    """For their temporary files; the agent removes it."""
    hang_dir: Path
    """Where they leave what they are asked for."""
    interface: str | None
    """The network interface of the node's address; None: nobody may choose one, or none has it."""


class NodeAgent:
    """A Ray actor without resources, one on each node of the run.

    It bears no mark of the run, whose processes it ends. Its guardian does that if the agent goes without a word: Ray
    ends it when the driver dies, or when the node leaves the cluster.
    """

    def __init__(self, run_id: str, node_id: str, *, kill_after_s: float) -> None:
        self._run_id, self._node_id, self._kill_after_s = run_id, node_id, kill_after_s
        self._since, self._pids = Moment.now(), set[int]()
        self._guardian = Guardian(run_id, since=self._since, kill_after_s=kill_after_s, node=node_id)
        remove_leftovers(Path(tempfile.gettempdir()))
        self._temp_dir = make_run_folder(run_id)
        self._guardian.tell(folders=[self._temp_dir])

    def open(self, address: str) -> NodePlace:
        """Makes the folders.

        Args:
            address: The node's, in the cluster.
        """
        hang_dir = self._temp_dir / "hang"
        hang_dir.mkdir(exist_ok=True)
        # What the node's owner has chosen for it is in this process's environment, and so in the actors'.
        interface = env.gloo_interface() or interface_of(address)
        return NodePlace(temp_dir=self._temp_dir, hang_dir=hang_dir, interface=interface)

    def note_processes(self) -> None:
        """Remembers who belongs to the run, for `close`; see `driver.cluster.Cluster.note_processes`."""
        self._pids |= {process.pid for process in run_processes(self._run_id, self._node_id)}
        self._guardian.tell(pids=self._pids)

    def ask_ranks(self, patience_s: float) -> tuple[Answers, Any]:
        """Asks the run's ranks on this node where they are; see `diagnostics.inquiry.ask_ranks`.

        Returns:
            The answers without the Flight Recorder's files, and a reference to these.
        """
        answers = ask_ranks(
            lambda: processes_of_run(self._run_id, self._node_id),
            patience_s=patience_s, folder=self._temp_dir / "hang", call_frame=CALL_FRAME,
        )  # fmt: skip
        return replace(answers, flights={}), ray.put(answers.flights)

    def logs(self) -> dict[str, bytes]:
        """Returns the end of what each process of the run on this node has printed, by the name of Ray's file."""
        self.note_processes()
        folder = Path(ray_worker.global_worker.node.get_logs_dir_path())
        files = [
            file for pid in self._pids for kind in ("out", "err") for file in folder.glob(f"worker-*-{pid}.{kind}")
        ]
        return {file.name: tail for file in files if (tail := _tail(file))}

    def close(self) -> None:
        """Ends what the run has left on this node, and removes its files."""
        self._pids |= {process.pid for process in run_processes(self._run_id, self._node_id)}
        reap(self._run_id, kill_after_s=self._kill_after_s, node=self._node_id)
        remove_ipc_files(ended(self._pids), since=self._since)
        shutil.rmtree(self._temp_dir, ignore_errors=True)
        self._guardian.dismiss(timeout_s=self._kill_after_s)


def _tail(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - LOG_BYTES))
        return opened.read()


def interface_of(address: str) -> str | None:
    """Returns the name of the interface that has an address; of the loopback one for all of its addresses.

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
