"""A whole job of verl's under our entry: what it has started ends with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.folders.claim import claimed
from tests.integration.runs import REPOSITORY, Running, finish, running

RECIPE = REPOSITORY / "recipes" / "verl" / "quickstart.sh"
SETTLE_S = 5.0
ENDS_S = 30.0


def start(folder: Path) -> list[str]:
    """The small recipe on CPUs, which comes as far as to its engines: verl does not know vLLM's CPU build."""
    overrides = [f"trainer.default_local_dir={folder / 'checkpoints'}"]
    return ["env", "DEVICE=cpu", f"PYTHON={sys.executable}", "bash", str(RECIPE), *overrides]


def left_after(run: Running, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while (found := run.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [" ".join(process.cmdline())[:100] for process in found]


@pytest.mark.every_case
def test_a_job_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with running(start(tmp_path), tmp_path / "job") as run:
        outcome = run.finish()
        assert left_after(run, 0) == []
    assert outcome.code == 1
    assert "rl_safe active: SafeMegatronEngine on training rank 0 of 2" in outcome.out + outcome.err
    assert "vllm version None not supported" in outcome.err


def test_a_failed_job_does_not_wait_for_its_threads_and_shows_its_last_words() -> None:
    source = """
import atexit, sys, threading, time
from rl_safe_workers.adapters.job_processes import exiting_at_once
if __name__ == "__main__":
    atexit.register(print, "what is registered for the exit has run")
    threading.Thread(target=time.sleep, args=(120,)).start()
    with exiting_at_once():
        sys.stderr.write("rl_safe: phase sync: nobody came")
        sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100)
    assert done.returncode == 3
    assert done.stdout.splitlines() == ["what is registered for the exit has run"]
    assert done.stderr.endswith("rl_safe: phase sync: nobody came")


@pytest.mark.every_case
def test_a_job_that_would_save_into_another_runs_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with claimed({"trainer.default_local_dir": folder}):
        outcome = finish(start(tmp_path), tmp_path / "job")
    assert outcome.code == 2
    refusal = f"rl_safe: another run is in the way: process {os.getpid()} on "
    assert outcome.err.splitlines()[-1].startswith(refusal)
    assert f"holds the folder {folder}: " in outcome.err
    assert outcome.left == []


@pytest.mark.parametrize(
    "signum",
    [
        *(pytest.param(number, marks=pytest.mark.every_case) for number in (signal.SIGTERM, signal.SIGINT)),
        signal.SIGKILL,
    ],
    ids=lambda signum: signum.name,
)
def test_a_job_that_is_stopped_or_killed_leaves_nothing(signum: signal.Signals, tmp_path: Path) -> None:
    with running(start(tmp_path), tmp_path / "job") as run:
        run.wait_until(lambda: "SafeTaskRunner" in run.out)
        run.process.send_signal(signum)
        stopped_s = time.monotonic()
        code = run.process.wait(ENDS_S)
        # What a killed driver leaves, its guardian ends.
        assert left_after(run, ENDS_S if signum is signal.SIGKILL else SETTLE_S) == []
        assert time.monotonic() - stopped_s < ENDS_S
    assert code == (-signum if signum is signal.SIGKILL else 128 + signum)
