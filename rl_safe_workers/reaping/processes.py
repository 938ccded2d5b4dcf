"""The processes and temporary folders of runs on this machine: found by their mark, ended, removed.

Imports no Ray, since the guardian that does without it needs this too.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from rl_safe_workers import env
from rl_safe_workers.foreign_files import read_foreign

logger = logging.getLogger(__name__)

TEMP_PREFIX, RUN_FILE, RAY_FOLDER = "rl_safe_", "run_id", "r"
"""Prefix of a run's temporary folder, the file in it that says whose it is, and the folder in it that Ray gets.

The file holds the run id, the driver's process id, when that was started (see `started_ticks`), and the namespace in
which the id counts. On a node of a cluster the agent stands for the driver. Ray opens its folder to all users (mode
0777), so that folder lies below one that only the run's user may enter. Its name is short, since the path of a socket
has at most 107 bytes."""
_RUN_FILE_BYTES = 1024


def run_processes(run_id: str, node: str | None = None) -> list[psutil.Process]:
    """Lists the living processes of this user, other than this one, that carry the run's mark.

    Args:
        run_id: The mark.
        node: Only those that carry the mark of this node, too; None: all on this machine.
    """
    found, user = [], os.geteuid()
    for process in psutil.process_iter():
        try:
            # Root can read the variables of everybody, who may set them to anything.
            if (
                process.pid != os.getpid()
                and process.uids().effective == user
                and env.belongs_to_run(process.environ(), run_id, node)
            ):
                found.append(process)
        except psutil.Error:
            continue  # gone, or another user's
    return [process for process in found if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    """Returns True if a process runs. One that has ended, and that its parent has not asked for yet, does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ended(pids: Iterable[int]) -> list[int]:
    """Returns those of the process ids under which nothing runs any more."""

    def runs(pid: int) -> bool:
        try:
            return is_alive(psutil.Process(pid))
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in pids if not runs(pid)]


def make_run_folder(run_id: str) -> Path:
    """Makes a temporary folder of a run, which `remove_leftovers` knows once this process and the run are gone.

    Its mode is 0700: nobody else may enter it, so the modes of what libraries put below it do not matter.
    """
    folder = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX))
    pid = os.getpid()
    (folder / RUN_FILE).write_text(f"{run_id} {pid} {started_ticks(pid)} {process_namespace()}", encoding="ascii")
    return folder


def remove_leftovers(temp: Path) -> None:
    """Removes temporary folders of runs of which no process is left: their drivers were killed.

    Args:
        temp: The folder for temporary files.
    """
    for folder in temp.glob(f"{TEMP_PREFIX}*"):
        with suppress(OSError, ValueError):  # another user's, gone meanwhile, or just being written
            if not _is_private(folder):
                continue
            text = read_foreign(folder / RUN_FILE, limit_bytes=_RUN_FILE_BYTES, within=folder, uid=os.getuid())
            run_id, pid, started, namespace = text.decode("ascii").split()
            # Of another container's processes nobody here can tell. A run that is only starting has no other process.
            if (
                namespace == process_namespace()
                and started_ticks(int(pid)) != int(started)
                and not run_processes(run_id)
            ):
                shutil.rmtree(folder, ignore_errors=True)


def _is_private(folder: Path) -> bool:
    """Returns True if this user made a folder for itself alone. In /tmp anyone may make one of that name."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def process_namespace() -> str:
    """Tells this machine and container from others that may share a folder for temporary files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def started_ticks(pid: int) -> int | None:
    """Returns when a process was started, in clock ticks since the machine's own start; None if there is no process.

    Together with the id it tells a process from a later one by the same number. A time of day does not: the clock may
    have been set since, and `psutil.Process.create_time` changes with it.
    """
    try:
        # The name, in brackets, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[19])


def reap(run_id: str, *, kill_after_s: float, node: str | None = None) -> None:
    """Terminates, then kills, whatever of a run is still alive. Blocks for little more than ``kill_after_s``.

    Args:
        run_id: The run's mark.
        kill_after_s: Seconds between asking a process to end and killing it.
        node: Only what bears the mark of this node, too; None: all of the run on this machine.
    """
    left = run_processes(run_id, node)
    for process in left:
        _signal(process.terminate)
    alive = _outlast(left, kill_after_s)
    deadline = time.monotonic() + kill_after_s
    while alive or (alive := run_processes(run_id, node)):
        for process in alive:
            _signal(process.kill)
        alive = _outlast(alive, 1.0)
        if time.monotonic() > deadline:
            logger.error("processes of run %s cannot be ended: %s", run_id, run_processes(run_id, node))
            return


def _outlast(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Waits for processes to end; returns those that have not. psutil would wait for zombies of other parents, too."""
    deadline = time.monotonic() + timeout_s
    while (processes := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return processes


def _signal(send: Callable[[], None]) -> None:
    with suppress(psutil.NoSuchProcess):
        send()
