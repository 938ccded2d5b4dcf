"""Reads the exit status of processes that are not children of this one.

Only the parent of a process gets its status from a wait. Until the parent has waited, the process is a zombie, and its
user can read the status in ``/proc/<pid>/stat`` (proc_pid_stat(5), ``exit_code``). torchrun waits only ten times a
second. A file descriptor of the process (pidfd_open(2)) becomes readable the moment it ends, so there is enough time.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from contextlib import suppress

from rl_safe_workers.diagnostics.proc_facts import look_at


class EndWatch:
    """Waits for the end of processes of this user."""

    def __init__(self) -> None:
        """Watches nobody yet."""
        self._pids: dict[int, int] = {}
        """Process id by file descriptor."""
        self._poll = select.poll()

    def watch(self, pids: Iterable[int]) -> None:
        """Adds processes to watch. Ignores processes that are gone or watched already."""
        for pid in {*pids} - {*self._pids.values()}:
            with suppress(OSError):  # it is gone, or the kernel is older than 5.3
                descriptor = os.pidfd_open(pid)
                self._pids[descriptor] = pid
                self._poll.register(descriptor, select.POLLIN)

    def wait(self, timeout_s: float) -> dict[int, int]:
        """Waits until processes end.

        Args:
            timeout_s: Longest wait.

        Returns:
            The exit code of each process that has ended, negative for a signal, by process id. It leaves out a process
            that ended with 0, and one whose parent read the status first.
        """
        found = {}
        for descriptor, _ in self._poll.poll(1000 * timeout_s):
            pid = self._pids.pop(descriptor)
            # The process id belongs to this process until its parent has waited. After that no zombie has the id.
            facts = look_at(pid)
            self._poll.unregister(descriptor)
            os.close(descriptor)
            if facts.exit_code:
                found[pid] = facts.exit_code
        return found

    def close(self) -> None:
        """Watches nobody any more."""
        for descriptor in self._pids:
            os.close(descriptor)
        self._pids.clear()
