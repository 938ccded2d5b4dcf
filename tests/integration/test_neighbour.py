"""A run beside another user of the machine: nothing of it can be written to, and what it learns does not change."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.integration.runs import REPOSITORY, SMALL, Outcome, finish, made_once, rl_safe, running

OWN_NETWORK = ["unshare", "--net"]
"""The attack reaches this run alone, not another one on this machine."""


def can_unshare() -> bool:
    return shutil.which("nsenter") is not None and subprocess.run([*OWN_NETWORK, "true"], check=False).returncode == 0


pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user"),
    pytest.mark.skipif(not can_unshare(), reason="no network namespace can be made here"),
]

OTHERS_MAY_WRITE, OTHERS_MAY_ENTER = stat.S_IWOTH, stat.S_IXOTH
ATTACK_S = float(os.environ.get("RL_SAFE_ATTACK_S", "6"))
"""Seconds of attack. The figure in docs/security.md is of 60."""
STEP_S = 1.5
"""Seconds that the reward function adds to each step."""
STEPS = round(ATTACK_S / STEP_S) + 2
REWARD = """
import os, time

calls = 0

def reward(data_source, solution_str, ground_truth, extra_info):
    global calls
    calls += 1
    if calls % 4 == 1:  # once a step
        time.sleep(float(os.environ["STEP_S"]))
    # The last step waits, so that the run outlives the attack on any machine.
    awaited, is_last = os.environ["AWAITED"], calls > 4 * (int(os.environ["STEPS"]) - 1)
    while awaited and is_last and not os.path.exists(awaited):
        time.sleep(0.1)
    return sum(map(ord, solution_str)) % 7 / 7
"""


def command(model: Path, step_s: float, *, awaited: Path | None) -> list[str]:
    """The run in a network of its own; it does not end before a file exists."""
    run = rl_safe(
        "quickstart.yaml",
        f"model.path={model}",
        *SMALL,
        "reward.function=mine:reward",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=4",
    )
    variables = ["env", f"STEP_S={step_s}", f"STEPS={STEPS}", f"AWAITED={awaited or ''}"]
    return [*OWN_NETWORK, *variables, sys.executable, "-m", "tests.integration.own_network", *run]


def reachable_and_writable(folder: Path) -> list[str]:
    """Folders that any user may write to, and can get at: each folder above them may be entered."""
    found: list[str] = []
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            mode = child.stat().st_mode
            if mode & OTHERS_MAY_WRITE and not mode & stat.S_ISVTX:
                found.append(str(child))
            if mode & OTHERS_MAY_ENTER:
                found += reachable_and_writable(child)
    return found


@pytest.fixture(scope="module")
def attacked(moe_model: Path) -> Iterator[tuple[Outcome, dict[str, Any], list[str]]]:
    """A run beside a neighbour, what the neighbour has tried, and folders that were open to it while the run lived."""
    # Not below pytest's own folder, which every session of pytest closes to others.
    with TemporaryDirectory(prefix="attacked_") as name:
        yield _attack(moe_model, Path(name))


def _attack(model: Path, folder: Path) -> tuple[Outcome, dict[str, Any], list[str]]:
    # The neighbour gets as far as the modes of the run's own folders allow.
    folder.chmod(0o755)
    (folder / "mine.py").write_text(REWARD)
    over = folder / "attack_over"
    with running(command(model, STEP_S, awaited=over), folder) as run:
        run.wait_until(run.has_finished_a_step)
        inside = ["nsenter", "--net", f"--target={run.process.pid}"]
        attack = [*inside, sys.executable, "-m", "tests.integration.neighbour", str(os.getuid()), str(ATTACK_S)]
        found = subprocess.run(
            [*attack, str(folder / "ran"), str(folder), str(run.temp)],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=ATTACK_S + 60,
            check=True,
        )
        assert run.process.poll() is None, "the run ended before the attack did"
        over.touch()
        open_folders = reachable_and_writable(run.temp) + reachable_and_writable(folder)
        return run.finish(), json.loads(found.stdout), open_folders


@pytest.fixture(scope="module")
def alone(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same run without a neighbour."""

    def make(folder: Path) -> Outcome:
        (folder / "mine.py").write_text(REWARD)
        return finish(command(moe_model, 0.0, awaited=None), folder)

    return made_once(tmp_path_factory, "alone", make)


def rewards(outcome: Outcome) -> list[Any]:
    return [(record["step"], record["reward/mean"], record["actor/loss"]) for record in outcome.records]


@pytest.mark.every_case
def test_a_run_beside_an_attack_learns_the_same_bit_for_bit(
    attacked: tuple[Outcome, dict[str, Any], list[str]], alone: Outcome
) -> None:
    outcome, _, _ = attacked
    assert alone.code == 0, alone.err
    assert rewards(outcome) == rewards(alone)


def test_an_attack_ends_no_run_runs_no_code_and_changes_no_file(
    attacked: tuple[Outcome, dict[str, Any], list[str]],
) -> None:
    outcome, tried, _ = attacked
    assert tried["messages sent"] > 100
    assert tried["processes"] > 0
    assert tried["files"] > 0
    assert outcome.code == 0, outcome.err
    assert len(rewards(outcome)) == STEPS
    assert outcome.left == []
    assert not (outcome.folder / "ran").exists()
    assert tried["changed"] == []
    assert tried["keys"] == []


def test_no_folder_of_a_living_run_is_writable_by_others(
    attacked: tuple[Outcome, dict[str, Any], list[str]],
) -> None:
    assert attacked[2] == []
