"""Runs that are asked to stop: they do so soon, and take everything along."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.runs import SMALL, Running, rl_safe, running

SOON_S = 20.0


def press_control_c(run: Running) -> None:
    """As a terminal does it: to every process of the group."""
    os.killpg(run.process.pid, signal.SIGINT)


def terminate(run: Running) -> None:
    """As a scheduler does it: to the process that it started."""
    run.process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("stop", "moment", "code", "message"),
    [
        (press_control_c, Running.has_started_a_trainer, 130, "interrupted by SIGINT"),
        (terminate, Running.has_finished_a_step, 143, "interrupted by SIGTERM"),
    ],
    ids=["Ctrl-C during start-up", "SIGTERM during training"],
)
def test_a_signal_ends_a_run_and_all_it_started(
    moe_model: Path,
    tmp_path: Path,
    stop: Callable[[Running], None],
    moment: Callable[[Running], bool],
    code: int,
    message: str,
) -> None:
    command = rl_safe("quickstart.yaml", f"model.path={moe_model}", "trainer.total_training_steps=1000", *SMALL)
    with running(command, tmp_path) as run:
        run.wait_until(lambda: moment(run))
        sent_s = time.monotonic()
        stop(run)
        outcome = run.finish(timeout_s=SOON_S + 10)
        assert time.monotonic() - sent_s < SOON_S
    assert outcome.code == code, outcome.err
    assert outcome.err == f"rl-safe: error: {message}\n"
    assert outcome.left == []
