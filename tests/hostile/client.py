"""The tests' end of the warm processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.hostile.canary import REPOSITORY
from tests.hostile.case import Command, Site
from tests.hostile.entries import ENTRIES
from tests.hostile.warm import Outcome


class Warm:
    """The warm processes, each started when it is first needed."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def run(self, command: Command, site: Site) -> Outcome:
        """Runs a command on an input, in a child of the warm process that has its modules."""
        group, _ = ENTRIES[command.entry]
        request = {"entry": command.entry, "arguments": command.arguments, "root": str(site.root)}
        return Outcome(**self._ask(group, json.dumps(request)))

    def close(self) -> None:
        """Ends all of them."""
        for process in self._processes.values():
            process.communicate(timeout=20)
        self._processes.clear()

    def _ask(self, group: str, request: str) -> dict[str, Any]:
        process = self._processes.get(group) or self._start(group)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            # This input fails for it; the next one gets another process.
            del self._processes[group]
            raise AssertionError(f"the warm process {group} has ended with {process.wait()}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def _start(self, group: str) -> subprocess.Popen[str]:
        # One thread each: a process that forks must have no others.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.hostile.warm", group],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, **threads, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "120"},
        )
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready, f"the warm process {group} has ended with {process.wait()}"
        self._processes[group] = process
        return process
