"""A process that outlives the driver, for the case that the driver is killed and can clean up no more.

Without it actors end within seconds, once Ray has noticed, but Ray's own agents only 40 to 60 s later, and what a dead
actor's libraries had spawned may never end. The driver holds the only writing end of the guardian's stdin, which the
kernel closes whatever the driver dies of. The guardian bears no mark of the run, so that nobody takes it for a process
that was left behind. It is no child of the driver either, and takes no notice of SIGTERM: ``ray job stop`` sends that
to the driver and all below it, and SIGKILL three seconds later.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from rl_safe_workers import env
from rl_safe_workers.own_process import module_command
from rl_safe_workers.reaping.ipc_files import Moment, remove_ipc_files
from rl_safe_workers.reaping.processes import ended, reap, run_processes

logger = logging.getLogger(__name__)

PIDS, FOLDERS, DONE = "pids", "folders", "done"
"""Keys of what the guardian is told, one JSON object a line."""


class Guardian:
    """The driver's end."""

    def __init__(self, run_id: str, *, since: Moment, kill_after_s: float, node: str | None = None) -> None:
        """Starts it; it needs a tenth of a second to come up, and nothing that happens before is lost.

        Args:
            run_id: Whose processes to end.
            since: When the run began.
            kill_after_s: How long a process gets between being asked to end and being killed.
            node: Only those of this node of the cluster; None: all on this machine.
        """
        whose = [run_id, *map(repr, since), str(kill_after_s), node or ""]
        command = module_command("rl_safe_workers.reaping.guardian", *whose)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # stays open until the guardian has ended
            text=True,
            env=env.unmarked(),
            start_new_session=True,  # what a terminal sends to the driver's group is for the driver to answer
        )

    def tell(self, *, pids: Iterable[int] = (), folders: Iterable[Path] = ()) -> None:
        """Tells it what to remove: files in shared memory of processes that end before it is needed, and folders."""
        self._write({PIDS: list(pids), FOLDERS: [str(folder) for folder in folders]})

    def dismiss(self, *, timeout_s: float) -> None:
        """Tells it that nothing is left to do, and waits for its end."""
        self._write({DONE: True})
        try:
            self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("the run's guardian has not ended within %.0f s", timeout_s)

    def _write(self, facts: dict[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(facts) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            logger.warning("the run's guardian is gone: should this process be killed, nobody ends what is left of it")


def guard(told: IO[str], run_id: str, *, since: Moment, kill_after_s: float, node: str | None = None) -> bool:
    """Waits until the driver is done or gone, and cleans up in the latter case.

    Args:
        told: What the driver says, see `Guardian`.
        run_id: As for `Guardian`.
        since: As for `Guardian`.
        kill_after_s: As for `Guardian`.
        node: As for `Guardian`.

    Returns:
        Whether the driver had gone without a word.
    """
    pids: set[int] = set()
    folders: list[Path] = []
    for line in told:
        try:
            facts = json.loads(line)
        except ValueError:
            break  # cut off: the driver died while it wrote
        if facts.get(DONE):
            return False
        pids.update(facts[PIDS])
        folders += map(Path, facts[FOLDERS])
    pids |= {process.pid for process in run_processes(run_id, node)}
    logger.warning("the driver of run %s is gone: ending what is left of the run", run_id)
    reap(run_id, kill_after_s=kill_after_s, node=node)
    remove_ipc_files(ended(pids), since=since)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return True


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="rl-safe: %(message)s")
    mark, unix, monotonic, patience_s, of_node = sys.argv[1:]
    began = Moment(unix_s=float(unix), monotonic_s=float(monotonic))
    guard(sys.stdin, mark, since=began, kill_after_s=float(patience_s), node=of_node or None)
