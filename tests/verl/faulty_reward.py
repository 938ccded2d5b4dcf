"""A reward function that goes wrong in one of verl's reward workers, for a whole job."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil

_sandboxes = threading.Semaphore(0)


def run_in_sandbox() -> None:
    """Waits for a sandbox that nobody gives back."""
    _sandboxes.acquire()


def score(data_source: str, solution_str: str, ground_truth: str, *, fault: str, **_: Any) -> float:
    """Rewards a response, or commits what the file ``fault`` says.

    Args:
        data_source: verl's, as the next two.
        solution_str: The response.
        ground_truth: The answer.
        fault: Path of a file: ``reward hangs`` or ``reward kills the agent loop``; with any other text nothing goes
            wrong. The file beside it that ends in ``.since`` gets the time.
    """
    kind, _, misdeed = Path(fault).read_text().partition(" ")
    since = Path(f"{fault}.since")
    if kind == "reward" and not since.exists():
        since.write_text(str(time.time()))
        if misdeed == "hangs":
            run_in_sandbox()
        for one in psutil.Process(os.getppid()).children():  # of this job's raylet
            if "AgentLoopWorker" in one.cmdline()[0]:  # verl's or ours
                one.send_signal(signal.SIGKILL)
    return float(len(solution_str) % 3)
