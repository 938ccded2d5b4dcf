"""Finds the processes and temporary folders of runs on this machine, ends the processes and removes the folders.

Imports no Ray, because the guardian, which does not import Ray, uses this module.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from rl_safe_workers import env
from rl_safe_workers.foreign_files import read_foreign
from rl_safe_workers.ranks import RankId

logger = logging.getLogger(__name__)

TEMP_PREFIX, RUN_FILE, RAY_FOLDER = "rl_safe_", "run_id", "r"
"""Prefix of a run's temporary folder; name of the file in it that identifies its owner; name of Ray's folder in it.

The file holds the run id, the driver's process id, the start time of that process (see `started_ticks`), and the
process namespace of the id. On a node of a cluster, the agent's process takes the place of the driver's. Ray opens its
folder to all users (mode 0777), so it is inside a folder that only the run's user may enter. Its name is short, because
the path of a socket has at most 107 bytes."""
_RUN_FILE_BYTES = 1024
_STAT_BYTES = 4096
_EXEC_S = 0.05
"""The kernel shows an empty environment for some milliseconds while a process starts a program (execve)."""


def run_processes(run_id: str, node: str | None = None) -> list[psutil.Process]:
    """Returns the living processes of this user that carry the run's mark.

    Leaves out this process and its resource tracker, which ends with it.

    Args:
        run_id: Id of the run, its mark.
        node: Ray's id of a node. Keeps only processes that also carry this mark; None keeps all on this machine.
    """
    found, starting, user = [], [], os.geteuid()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process has ended, or belongs to another user
            # Root can read the environment of every user, and another user may have set any value.
            if process.pid == os.getpid() or process.uids().effective != user:
                continue
            environ = process.environ()
            if env.belongs_to_run(environ, run_id, node):
                found.append(process)
            elif not environ and process.exe():
                starting.append(process)
    if starting:
        time.sleep(_EXEC_S)
    for process in starting:
        with suppress(psutil.Error):
            if env.belongs_to_run(process.environ(), run_id, node):
                found.append(process)
    return [process for process in found if is_alive(process) and not _is_own_resource_tracker(process)]


def is_alive(process: psutil.Process) -> bool:
    """Returns True if a process runs. A zombie does not run."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ended(pids: Iterable[int]) -> list[int]:
    """Returns the process ids under which no process runs any more."""

    def runs(pid: int) -> bool:
        try:
            return is_alive(psutil.Process(pid))
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in pids if not runs(pid)]


def make_run_folder(run_id: str) -> Path:
    """Makes a temporary folder of a run. `remove_leftovers` removes it when this process and the run are gone.

    Its mode is 0700. No other user may enter it, so the modes of files that libraries write in it do not matter.
    """
    folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX))
    pid = os.getpid()
    (folder / RUN_FILE).write_text(f"{run_id} {pid} {started_ticks(pid)} {process_namespace()}", encoding="ascii")
    return folder


def socket_folder(run_id: str) -> Path:
    """Returns the folder for a run's sockets, the same path on each machine. It need not exist yet.

    It is in ``/tmp`` whatever ``TMPDIR`` says. The path of a socket must be short, and machines may share ``TMPDIR``.
    """
    return Path("/tmp", f"{TEMP_PREFIX}{run_id}")


def private_socket_folder(run_id: str) -> Path:
    """Makes the folder of `socket_folder`, if it does not exist, and returns it.

    Raises:
        OSError: If the folder cannot be made, or if another user may write to the existing one.
    """
    folder = socket_folder(run_id)
    make_private(folder)
    return folder


def make_private(folder: Path) -> None:
    """Makes a folder that only this user may enter. Accepts an existing folder that nobody else may write to.

    Raises:
        OSError: If the folder cannot be made, or if another user may write to the existing one.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        raise PermissionError(errno.EPERM, "is not this user's alone", str(folder))


def remove_leftovers(temp: Path) -> None:
    """Removes the temporary folders of runs that have no process any more, because their drivers were killed.

    Args:
        temp: The folder for temporary files.
    """
    for folder in temp.glob(f"{TEMP_PREFIX}*"):
        with suppress(OSError, ValueError):  # another user's folder, already removed, or only partly written
            if not _is_private(folder):
                continue
            text = read_foreign(folder / RUN_FILE, limit_bytes=_RUN_FILE_BYTES, within=folder, uid=os.getuid())
            run_id, pid, started, namespace = text.decode("ascii").split()
            # Processes of another container cannot be seen from here. A starting run may have only its driver.
            if (
                namespace == process_namespace()
                and started_ticks(int(pid)) != int(started)
                and not run_processes(run_id)
            ):
                shutil.rmtree(folder, ignore_errors=True)


def _is_private(folder: Path) -> bool:
    """Returns True if a folder belongs to this user and nobody else may write to it.

    Any user may make a folder or a link with such a name in /tmp.
    """
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def process_namespace() -> str:
    """Returns an id of this machine and container. Others may share its folder for temporary files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


class ProcessStat(NamedTuple):
    """The kernel's facts about a process: its state, its parent and its start.

    Example: ``ProcessStat(state="S", parent=1, started=98765)``
    """

    state: str
    """The kernel's letter, e.g. ``"T"`` for a stop by SIGSTOP."""
    parent: int
    started: int
    """Clock ticks from the machine's boot to the start of the process."""


def stat_of(pid: int) -> ProcessStat | None:
    """Returns the kernel's facts about a process; None if there is no process."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        # The process name, in parentheses, may contain any character.
        fields = os.read(descriptor, _STAT_BYTES).rpartition(b")")[2].split()
    except ProcessLookupError:
        return None
    finally:
        os.close(descriptor)
    return ProcessStat(state=fields[0].decode("ascii"), parent=int(fields[1]), started=int(fields[19]))


def started_ticks(pid: int) -> int | None:
    """Returns the start time of a process in clock ticks since the machine booted; None if there is no process.

    Process id and start time together identify a process, even if the id is used again later. A wall-clock time does
    not: the clock may be set meanwhile, and `psutil.Process.create_time` changes with it.
    """
    stat = stat_of(pid)
    return None if stat is None else stat.started


def reap(run_id: str, *, kill_after_s: float, node: str | None = None) -> None:
    """Terminates, then kills, the living processes of a run. Blocks for at most twice ``kill_after_s`` and a second.

    Args:
        run_id: Id of the run, its mark.
        kill_after_s: Seconds between asking a process to end and killing it.
        node: Ray's id of a node. Ends only processes that also carry this mark; None: all of the run on this machine.
    """
    left = run_processes(run_id, node)
    for process in left:
        _signal(process.terminate)
    alive = _outlast(left, kill_after_s)
    deadline = time.monotonic() + kill_after_s
    while alive or (alive := run_processes(run_id, node)):
        alive = _kill(alive, 1.0)
        if time.monotonic() > deadline:
            logger.error("processes of run %s cannot be ended: %s", run_id, run_processes(run_id, node))
            return


def end_rank(run_id: str, rank_id: RankId, *, timeout_s: float) -> list[psutil.Process]:
    """Kills the living processes of one rank of a run on this machine, and waits for their end.

    Args:
        run_id: Id of the run, its mark.
        rank_id: The rank. Its children carry its mark, too.
        timeout_s: Longest wait in seconds.

    Returns:
        The processes that have not ended in time.
    """
    deadline = time.monotonic() + timeout_s
    while (alive := rank_processes(run_id, rank_id)) and (left_s := deadline - time.monotonic()) > 0:
        _kill(alive, min(1.0, left_s))
    return alive


def rank_processes(run_id: str, rank_id: RankId) -> list[psutil.Process]:
    """Returns the living processes of one rank of a run on this machine, its children included."""
    found = []
    for process in run_processes(run_id):
        with suppress(psutil.Error):  # it has ended
            if env.actor_of(process.environ()) == rank_id:
                found.append(process)
    return found


def _kill(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Kills processes, and waits for their end. Returns those that have not ended, for another call.

    It kills Python's resource trackers only if no other process is left. A tracker serves the other processes: once
    they have ended, it removes their named semaphores from ``/dev/shm``, and ends by itself.
    """
    served = [process for process in processes if not _is_resource_tracker(process)]
    for process in served or processes:
        _signal(process.kill)
    return _outlast(processes, timeout_s)


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:  # it has ended
        return False


def _is_own_resource_tracker(process: psutil.Process) -> bool:
    try:
        return process.ppid() == os.getpid() and _is_resource_tracker(process)
    except psutil.Error:  # it has ended
        return False


def _outlast(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Waits for processes to end; returns those that have not.

    psutil's own function would also wait for zombies of other parents.
    """
    deadline = time.monotonic() + timeout_s
    while (processes := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return processes


def _signal(send: Callable[[], None]) -> None:
    with suppress(psutil.NoSuchProcess):
        send()
