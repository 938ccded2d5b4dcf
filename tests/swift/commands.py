"""Whole ``megatron`` commands as users start them, one rank of which is broken."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_safe_workers.adapters.swift.swift_settings import VARIABLE
from tests.swift.jobs import environment

CUT_S = 120.0
"""When stock is given up."""
STRIKES_BY_S = 400.0
GRACE_S = 2.0
_MARK = "SWIFT_TEST_JOB"


@dataclass(frozen=True, kw_only=True)
class End:
    """How a command has ended."""

    status: int | None
    """None if it was cut."""
    seconds: float
    """From the failure, or else from the start, to the end of the command."""
    left: list[int]
    """Processes of the job that still ran."""
    output: str
    place: str
    """Where a driver of Ray mode waited when it was cut; empty otherwise."""

    @property
    def verdict(self) -> list[str]:
        """The lines of our first verdict: what it began with, what to do, where the evidence is; the last two may lack.

        The driver of Ray mode gives one; under torchrun each rank does that fails or is ended because of a failure.
        """
        plain = re.sub(r"^\[rank\d+\]: ?", "", self.output, flags=re.MULTILINE)  # torch's, while a rank ends
        who = r"(?:training rank \d+: )?the job has failed(?: on training rank [\d, ]+)?"
        found = re.search(rf"^{who}: (.*(?:\n.*){{0,2}})", plain, re.MULTILINE)
        lines = found[1].splitlines() if found is not None else [""]
        return lines if lines[-1].startswith("evidence in ") else lines[:1]

    @property
    def named_by_us(self) -> bool:
        """True if our first verdict names training rank 1."""
        told = re.search(r"the job has failed(?: on training rank 1: |: .*\btraining rank 1\b)", self.output)
        return told is not None

    @property
    def named_by_torchrun(self) -> bool:
        """True if torchrun does."""
        return "rank      : 1 " in self.output.rpartition("Root Cause")[2]

    @property
    def by(self) -> str:
        """Says who names it."""
        named = (("us", self.named_by_us), ("torchrun", self.named_by_torchrun))
        return " and ".join(who for who, does in named if does) or "nobody"

    def row(self, name: str) -> str:
        """A line of a table."""
        ended = "cut" if self.status is None else f"{self.seconds:.1f} s, status {self.status}"
        place = f"; the driver waits in {self.place}" if self.place else ""
        return f"{name:28} {ended:20} rank 1 named by {self.by}; {len(self.left)} left{place}"


def processes_of(mark: str) -> list[int]:
    """The processes of a job, by their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{_MARK}={mark}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended
    return found


def run(
    folder: Path,
    args: Sequence[str],
    *,
    settings: dict[str, Any],
    breaks: bool = True,
    limit_s: float = CUT_S,
    **env: str,
) -> End:
    """Runs ``megatron`` to its end, or to ``limit_s`` after the failure.

    Args:
        folder: Where it runs.
        args: Its arguments.
        settings: Ours.
        breaks: Whether something is to break.
        limit_s: Seconds from the failure until it is given up; from the start, if nothing is to break.
        **env: More variables.
    """
    mark = f"{folder}-{time.time()}"
    with subprocess.Popen(
        [str(Path(sys.executable).parent / "megatron"), *args],
        cwd=folder,
        env=environment(
            **{
                _MARK: mark,
                VARIABLE: json.dumps(settings),
                "STRUCK": str(folder / "struck"),
                **env,
            }
        ),
        stdout=(folder / "output").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        since = time.time()
        while (
            breaks
            and process.poll() is None
            and not (folder / "struck").exists()
            and time.time() < since + STRIKES_BY_S
        ):
            time.sleep(0.05)
        if breaks:
            assert (folder / "struck").exists(), (folder / "output").read_text()[-3000:]
            since = float((folder / "struck").read_text())
        try:
            status: int | None = process.wait(max(0.0, limit_s - (time.time() - since)))
        except subprocess.TimeoutExpired:
            status = None
        seconds = time.time() - since
        place = place_of_driver(folder) if status is None else ""
        # The kernel may take a moment to take the last one away.
        gone_by_s = time.monotonic() + GRACE_S
        while (left := processes_of(mark)) and status is not None and time.monotonic() < gone_by_s:
            time.sleep(0.05)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    output = (folder / "output").read_text()
    return End(status=status, seconds=seconds, left=left if status is not None else [], output=output, place=place)


def place_of_driver(folder: Path) -> str:
    """Asks a driver of Ray mode where it waits: the line of ms-swift's."""
    if not (folder / "driver").exists():
        return ""
    os.kill(int((folder / "driver").read_text()), signal.SIGUSR1)
    time.sleep(1)
    frames = re.findall(r'File "[^"]*/(swift/[^"]+)", line (\d+) in (\w+)', (folder / "stack").read_text())
    return " < ".join(f"{file}:{line} ({name})" for file, line, name in frames[:3])
