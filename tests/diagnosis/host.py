"""A fault of the suite, and the end of the run, as a user sees it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rl_safe_workers.ranks import RankId, Role
from tests.diagnosis.misdeeds import STORAGE

ROOT = Path(__file__).parents[2]
INJECT = Path(__file__).parent / "inject"
VARIABLE = "RL_SAFE_TEST_MISDEED"
TIMEOUT_S = 10.0
"""Deadline of the phase that a fault strikes in."""
ALLOWED_S = 10.0
"""How much later than its deadline a run may have ended."""
_LONGEST_S = 400.0
HANDING_OUT_S = 40.0
"""The same of generation under verl: on a busy machine agent loops are slow to take their first prompts."""


class Fault(NamedTuple):
    """One fault of one rank in one phase."""

    phase: str
    act: str
    """By `misdeeds.commit`."""
    rank: int = 1
    detail: str = ""
    """Which exception, by `misdeeds.RAISED`."""
    role: str = "trainer"
    at: int = 1
    """Which stay in the phase, counted from 1."""
    call: str = ""
    """The engine's call, where a phase has several."""

    @property
    def who(self) -> str:
        """The rank, as messages name it."""
        return str(RankId(Role(self.role), self.rank))


class Seen(NamedTuple):
    """The end of a run, as a user sees it."""

    first_line: str
    """The root cause, as our package prints it."""
    advice: str
    evidence: str
    """The folder with the evidence."""
    after_s: float
    """Seconds from the fault to the end of the run."""
    output: str
    status: int


def deadline_s(fault: Fault, *, is_verl: bool = False) -> float:
    """Returns the deadline of the phase that a fault strikes in, in seconds."""
    return HANDING_OUT_S if is_verl and fault.phase == "rollout" else TIMEOUT_S


def variables(fault: Fault, folder: Path) -> dict[str, str]:
    """Returns the environment in which a fault strikes.

    Args:
        fault: The fault.
        folder: An empty folder, which tells when it has struck.
    """
    path = os.pathsep.join(filter(None, (str(INJECT), str(ROOT), os.environ.get("PYTHONPATH"))))
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "RES_OPTIONS": "attempts:0", "OMP_NUM_THREADS": "1"}
    return {**quiet, "PYTHONPATH": path, VARIABLE: json.dumps({**fault._asdict(), "folder": str(folder)})}


def ended(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, *, strikes: bool = True
) -> tuple[int, str, float]:
    """Runs a command to its end.

    Args:
        command: The command line.
        environment: Added to this process's.
        folder: The working directory, and the one that was given to `variables`.
        strikes: True if a fault strikes; else the command has to succeed.

    Returns:
        The exit status, the output, and seconds from the fault to the end.

    Raises:
        AssertionError: If the fault has not struck.
    """
    log = folder / "log"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RL_SAFE", "VERL_"))}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env={**clean, **environment}, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = process.wait(timeout=_LONGEST_S)
            ended_at = time.time()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=15)
            with suppress(OSError):  # there is no such child
                os.close(os.open(folder / STORAGE, os.O_WRONLY | os.O_NONBLOCK))
    output = log.read_text(errors="replace")
    if not strikes:
        assert status == 0, output[-4000:]
        return status, output, 0.0
    assert (folder / "struck").exists(), f"the fault has not struck:\n{output[-4000:]}"
    return status, output, ended_at - float((folder / "struck").read_text())


def told(output: str, pattern: str) -> tuple[str, str, str]:
    """Returns the three lines of a verdict.

    Args:
        output: What the run has printed.
        pattern: Finds the verdict; its group is the first line.
    """
    found = list(re.finditer(pattern, output, re.MULTILINE))
    if not found:
        return "", "", ""
    rest = output[found[-1].end() :].splitlines()[1:3]
    advice, evidence = [*rest, "", ""][:2]
    return found[-1].group(1), advice, evidence.removeprefix("evidence in ")
