"""Runs the guardian, a process that outlives the driver and cleans up if the driver is killed.

Without it, Ray ends the actors within seconds, but its own agents end only 40 to 60 s later, and children of a dead
actor's libraries may never end. The driver holds the only write end of the guardian's stdin. The kernel closes it when
the driver dies for any reason.

The guardian also notes the segments of shared memory that the run's processes have mapped. With an actor, Ray kills all
processes that the actor has started, such as vLLM's workers, and also multiprocessing's resource tracker, which would
remove their segments. At the end of the run nobody could tell any more whose segments these were.

The guardian does not carry the mark of the run, so that nobody ends it as a leftover. It is not a child of the driver
and ignores SIGTERM: ``ray job stop`` sends SIGTERM to the driver and all its descendants, and SIGKILL three seconds
later.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rl_safe_workers import env
from rl_safe_workers.own_process import module_command
from rl_safe_workers.reaping.ipc_files import Moment, remove_ipc_files, segments_of
from rl_safe_workers.reaping.processes import ended, reap, run_processes

logger = logging.getLogger(__name__)

PIDS, FOLDERS, DONE, STAY = "pids", "folders", "done", "stay"
"""Keys of the messages to the guardian, one JSON object per line."""
_NOTE_EVERY_S = 20.0
"""Seconds from one look at the segments to the next. A look takes some milliseconds for each process of the run."""
_staying: list[Guardian] = []
"""Keeps the pipes of guardians open that wait for this process's end."""


class Guardian:
    """The driver's handle of the guardian process."""

    def __init__(self, run_id: str, *, since: Moment, kill_after_s: float, node: str | None = None) -> None:
        """Starts the guardian. It needs 0.1 s to start; messages sent before are not lost.

        Args:
            run_id: Id of the run whose processes it ends.
            since: The moment when the run began.
            kill_after_s: Seconds between asking a process to end and killing it.
            node: Ray's id of a node. Only processes marked with it are ended; None: all of the run on this machine.
        """
        whose = [run_id, *map(repr, since), str(kill_after_s), node or ""]
        command = module_command("rl_safe_workers.reaping.guardian", *whose)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # stays open until the guardian has ended
            text=True,
            env=env.unmarked(),
            start_new_session=True,  # a terminal's signals must reach only the driver
        )

    def tell(self, *, pids: Iterable[int] = (), folders: Iterable[Path] = ()) -> None:
        """Tells the guardian what to remove.

        Args:
            pids: Processes of the run. When they have ended, their files in shared memory are removed.
            folders: Folders to remove.
        """
        self._write({PIDS: list(pids), FOLDERS: [str(folder) for folder in folders]})

    def dismiss(self, *, timeout_s: float) -> None:
        """Tells the guardian that the run's processes have ended, and waits until it has ended, too.

        It still removes segments of processes that were killed during the run.
        """
        self._write({DONE: True})
        try:
            self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("the run's guardian has not ended within %.0f s", timeout_s)

    def stay(self) -> None:
        """Tells the guardian to wait until this process has ended, and then to end the run's remaining processes.

        Call it after a thread with work of the run was abandoned. Nothing can end the thread, and it may start further
        processes.
        """
        self._write({STAY: True})
        _staying.append(self)

    def _write(self, facts: dict[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(facts) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            logger.warning("the run's guardian has ended: if this process is killed, what is left of the run stays")


def guard(
    told: Iterable[str | None], run_id: str, *, since: Moment, kill_after_s: float, node: str | None = None
) -> bool:
    """Waits until the driver dismisses the guardian, or dies. Cleans up if the driver has died.

    Args:
        told: Messages from the driver, see `Guardian`. At each None it notes the segments of the run's processes.
        run_id: As for `Guardian`.
        since: As for `Guardian`.
        kill_after_s: As for `Guardian`.
        node: As for `Guardian`.

    Returns:
        True if the driver died without dismissing it, or has told it to stay.
    """
    pids: set[int] = set()
    noted: frozenset[Path] = frozenset()
    stays = False
    folders: list[Path] = []
    for line in told:
        if line is None:
            now = segments_of(process.pid for process in run_processes(run_id, node))
            noted = frozenset(filter(Path.exists, noted | now))
            continue
        try:
            facts = json.loads(line)
        except ValueError:
            break  # the line is cut off: the driver died while it wrote
        if facts.get(DONE):
            remove_ipc_files((), since=since, segments=noted)
            return False
        if stays := bool(facts.get(STAY)):
            continue
        pids.update(facts[PIDS])
        folders += map(Path, facts[FOLDERS])
    pids |= {process.pid for process in run_processes(run_id, node)}
    if not stays:
        logger.warning("the driver of run %s is gone: ending what is left of the run", run_id)
    segments = segments_of(pids) | noted
    reap(run_id, kill_after_s=kill_after_s, node=node)
    remove_ipc_files(ended(pids), since=since, segments=segments)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return True


def lines_of(pipe: int, *, every_s: float) -> Iterator[str | None]:
    """Yields the lines that come through a pipe, until its other end is closed. The last one may be cut off.

    Yields None whenever nothing has come for a while.

    Args:
        pipe: The file descriptor.
        every_s: Seconds to wait for something.
    """
    rest = b""
    while True:
        ready, _, _ = select.select([pipe], [], [], every_s)
        if not ready:
            yield None
            continue
        data = os.read(pipe, 65536)
        *lines, rest = (rest + data).split(b"\n")
        yield from map(bytes.decode, lines)
        if not data:
            if rest:
                yield rest.decode()
            return


if __name__ == "__main__":
    # Ignore signals before the fork. A signal may come as soon as the child runs, and would end it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    logging.basicConfig(level=logging.WARNING, format="rl-safe: %(message)s")
    mark, unix, monotonic, patience_s, of_node = sys.argv[1:]
    began = Moment(unix_s=float(unix), monotonic_s=float(monotonic))
    told_here = lines_of(sys.stdin.fileno(), every_s=_NOTE_EVERY_S)
    guard(told_here, mark, since=began, kill_after_s=float(patience_s), node=of_node or None)
