"""The driver itself is killed, so that nobody of ours is left to clean up: what it had started ends all the same."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.cases import CONFIG
from tests.chaos.conftest import NOTE
from tests.integration.runs import Running, rl_safe, running

RUNS = 20
LONGEST_S = 18.0
"""About the length of a whole run on idle cores; one that has ended before its kill is not counted."""
SETTLE_S = 25.0
"""How long what is left of a run may take to end: the guardian asks it to, and kills what has not after 10 s."""


def wait_until_all_have_ended(run: Running) -> None:
    deadline = time.monotonic() + SETTLE_S
    while run.processes() and time.monotonic() < deadline:
        time.sleep(0.2)


def kill_driver(folder: Path, *, after_s: float) -> tuple[bool, list[str]]:
    """Returns whether the run was alive when its driver was to be killed, and the processes and files left of it."""
    command = rl_safe("quickstart.yaml", f"model.path={folder / 'model'}", "model.create={}", *CONFIG)
    with running(command, folder) as run:
        time.sleep(after_s)
        is_alive = run.process.poll() is None
        run.process.kill()
        run.process.wait(10)
        wait_until_all_have_ended(run)
        return is_alive, run.finish().left


@pytest.mark.chaos
@pytest.mark.timeout(RUNS * (LONGEST_S + SETTLE_S + 20))
def test_nothing_outlives_twenty_runs_whose_driver_was_killed(
    record_property: Callable[[str, object], None], tmp_path: Path
) -> None:
    moments, killed, left = random.Random(0), 0, []
    for number in range(RUNS):
        is_alive, of_run = kill_driver(tmp_path / str(number), after_s=moments.uniform(1, LONGEST_S))
        killed += is_alive
        left += of_run
    record_property(
        NOTE,
        f"In {RUNS} more runs, {killed} drivers were killed at a random moment. Of processes, files in `/dev/shm` "
        f"and temporary files, these runs left {len(left)}.",
    )
    assert killed > RUNS // 2
    assert left == []
