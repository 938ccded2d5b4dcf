"""Ends the processes of a host's job on every node whenever the job ends, for whatever reason.

On each node, the ranks write facts to a folder. The driver asks for these facts after a failure. The folder is removed
with the job.

The processes of a job carry its mark. Ray ends its actors with the job, but not the processes that the actors have
started, e.g. the 32 workers that compile for a trainer. The driver ends such processes on its own machine. An actor
ends them on each other node. If the driver is killed, guardians end them.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_safe_workers import env
from rl_safe_workers.adapters.job_inquiry import Place, ask_here
from rl_safe_workers.compat.ray_tables import logs_folder
from rl_safe_workers.diagnostics.inquiry import Answers
from rl_safe_workers.diagnostics.stopped import MachineWatch
from rl_safe_workers.errors import first_line
from rl_safe_workers.reaping.guardian import Guardian
from rl_safe_workers.reaping.ipc_files import Moment, remove_ipc_files, segments_of
from rl_safe_workers.reaping.processes import TEMP_PREFIX, ended, reap, run_processes, socket_folder

logger = logging.getLogger(__name__)

KILL_AFTER_S = 10.0
"""Seconds between asking a process to end and killing it."""
FAILED_KILL_AFTER_S = 2.0
"""The same after a failure. It is shorter, because trainers know of the failure and no save is left to finish."""
_NODE_STARTS_S = 60.0
"""Seconds within which the actor of a node starts."""
_NODE_ENDS_S = 2 * KILL_AFTER_S + 5.0
"""Seconds within which the actor of a node ends the processes there."""


class MachineProcesses:
    """The processes of a job on one machine. It is a Ray actor on every node except the driver's."""

    def __init__(self, run_id: str, folder: Path) -> None:
        """Starts the guardian, which ends the job's processes when this process dies.

        Args:
            run_id: The mark of the job's processes.
            folder: Where ranks leave their answers; see `folder_of`.
        """
        self._run_id, self._since, self._folder = run_id, Moment.now(), folder
        self._guardian = Guardian(run_id, since=self._since, kill_after_s=KILL_AFTER_S)
        self._guardian.tell(folders=[folder, socket_folder(run_id)])
        self._watch: MachineWatch | None = None

    def watch(self, stop_limit_s: float) -> None:
        """Starts the watch for stopped processes. Idempotent.

        Args:
            stop_limit_s: Seconds after which a stopped process is ended; 0: none is watched.
        """
        if self._watch is None:
            self._watch = MachineWatch(self._run_id, self._folder, stop_limit_s)

    def ask(self, places: Sequence[Place], patience_s: float) -> Answers:
        """Asks ranks on this machine where they are; see `ask_here`."""
        return ask_here(places, patience_s, self._folder, logs=logs_folder())

    def end(self, *, kill_after_s: float, stop: Callable[[], object] = lambda: None) -> None:
        """Ends the processes, removes their shared memory and their folders, and dismisses the guardian.

        Args:
            kill_after_s: Seconds between asking a process to end and killing it.
            stop: Ends some of the processes, e.g. ``ray.shutdown``. This method calls it first.
        """
        if self._watch is not None:
            self._watch.close()
        pids = {process.pid for process in run_processes(self._run_id)}
        segments = segments_of(pids)
        stop()
        reap(self._run_id, kill_after_s=kill_after_s)
        remove_ipc_files(ended(pids), since=self._since, segments=segments)
        for folder in (self._folder, socket_folder(self._run_id)):
            shutil.rmtree(folder, ignore_errors=True)
        self._guardian.dismiss(timeout_s=KILL_AFTER_S)


def folder_of(run_id: str) -> Path:
    """Returns the folder in which the ranks of a job leave files, the same path on each machine. A rank creates it."""
    return Path(tempfile.gettempdir(), f"{TEMP_PREFIX}{run_id}")


def _name_of_keeper(run_id: str, node_id: str) -> str:
    return f"{TEMP_PREFIX}{run_id}_{node_id}"


def keeper_of(run_id: str | None, node_id: str) -> Any:
    """Returns the actor that looks after a job's processes on a node; None if the node has no such actor."""
    try:
        return ray.get_actor(_name_of_keeper(run_id or "", node_id))
    except ValueError:
        return None


class JobProcesses:
    """The processes of a job on every node of its cluster.

    Attributes:
        folder: Where ranks leave their answers, each on its own machine: `env.HANG_DIR` of the job.
    """

    def __init__(self, run_id: str) -> None:
        """Looks after the processes on this machine; `watch_nodes` adds the other nodes.

        Args:
            run_id: The mark of the job's processes.
        """
        self._run_id, self.folder = run_id, folder_of(run_id)
        self._here = MachineProcesses(run_id, self.folder)
        self._nodes: dict[Any, str] = {}
        """The address of each other node, by the node's actor."""

    def watch_nodes(self, stop_limit_s: float) -> None:
        """Starts an actor on each other node of the cluster, and the watch for stopped processes on each node.

        Call it once Ray is up; before that it does nothing. If an actor cannot start, a warning names its node. On that
        node, only Ray ends processes.

        Args:
            stop_limit_s: Seconds after which a stopped process of the job is ended; 0: none is watched.
        """
        if not ray.is_initialized():  # the calls below would start Ray
            return
        self._here.watch(stop_limit_s)
        here = ray.get_runtime_context().get_node_id()
        # The actor has no mark, because it ends every process that has the mark.
        options = {"num_cpus": 0, "runtime_env": {"env_vars": {env.RUN_ID: ""}}}
        keeper = ray.remote(MachineProcesses)
        others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
        for node in others:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            name = _name_of_keeper(self._run_id, node["NodeID"])
            actor = keeper.options(name=name, **options, scheduling_strategy=strategy).remote(self._run_id, self.folder)
            self._nodes[actor] = node["NodeManagerAddress"]
        starting = {actor.watch.remote(stop_limit_s): actor for actor in self._nodes}
        for actor, why in _failures(starting, _NODE_STARTS_S):
            node_name = self._nodes.pop(actor)
            logger.warning("on node %s nothing ends the job's processes but Ray: %s", node_name, why)

    def end(self, *, kill_after_s: float = KILL_AFTER_S) -> None:
        """Ends every process of the job on every node, and also Ray if this process has started it.

        Args:
            kill_after_s: Seconds between asking a process to end and killing it.
        """
        if ray.is_initialized():
            ending = {actor.end.remote(kill_after_s=kill_after_s): actor for actor in self._nodes}
            for actor, why in _failures(ending, _NODE_ENDS_S):
                logger.warning("node %s has not confirmed that no process is left there: %s", self._nodes[actor], why)
        self._here.end(kill_after_s=kill_after_s, stop=ray.shutdown)


def _failures(calls: dict[Any, Any], patience_s: float) -> list[tuple[Any, str]]:
    """Waits for remote calls; returns the actors whose calls have failed or not ended in time, each with the reason.

    Args:
        calls: The actor of each call, by the Ray reference to the call's result.
        patience_s: Longest wait, in seconds.
    """
    if not calls:
        return []
    done, late = ray.wait(list(calls), num_returns=len(calls), timeout=patience_s)
    found = [(calls[call], f"no answer within {patience_s:.0f} s") for call in late]
    for call in done:
        try:
            ray.get(call)
        except ray.exceptions.RayError as error:
            found.append((calls[call], first_line(error)))
    return found


@contextmanager
def ending_all_processes(run_id: str) -> Iterator[JobProcesses]:
    """Ends every process of a job when the body is left or this process dies.

    Args:
        run_id: The mark of the job's processes.
    """
    processes = JobProcesses(run_id)
    kill_after_s = KILL_AFTER_S
    try:
        yield processes
    except Exception:  # not KeyboardInterrupt: after a signal, trainers still work and need the longer time
        kill_after_s = FAILED_KILL_AFTER_S
        raise
    finally:
        processes.end(kill_after_s=kill_after_s)


@contextmanager
def exiting_at_once() -> Iterator[None]:
    """Ends this process by ``os._exit`` when the body exits with a status other than 0. Runs atexit handlers first.

    A normal exit takes seconds to clear the thousands of modules of torch and the host. It also waits for threads that
    may never end.
    """
    try:
        yield
    except SystemExit as ending:
        if not isinstance(ending.code, int) or ending.code == 0:
            raise
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ending.code)


_signals: list[signal.Signals] = []
"""Signals that `_stop` has handled. Ctrl-C is not among them: Python handles it."""


def answer_sigterm() -> None:
    """Handles SIGTERM like Ctrl-C.

    Call it again once Ray is up. Ray's own handler would print the stack and end this process.
    """
    signal.signal(signal.SIGTERM, _stop)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    """Raises KeyboardInterrupt, the only exception of a signal handler that a wait in Ray passes on."""
    _signals.append(signal.Signals(signum))
    raise KeyboardInterrupt


def stopped_by() -> signal.Signals:
    """Returns the signal that caused a KeyboardInterrupt."""
    (signum,) = _signals[:1] or [signal.SIGINT]
    return signum
