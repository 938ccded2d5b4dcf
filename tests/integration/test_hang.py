"""A run that hangs or loses a rank: one line says who is missing and where, or why it died."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from rl_safe_workers.diagnostics.log_lines import ADVICE
from rl_safe_workers.diagnostics.log_lines import Fault as Ended
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role
from tests.chaos.plan import VARIABLE, Fault, Kind, to_json
from tests.integration.runs import RECIPES, SMALL, finish

ENDS_S = 90.0
"""Seconds from a stop to the end of the run on a busy machine: less than any timeout of a phase."""


def test_a_trainer_that_sleeps_for_ever_is_found_where_it_sleeps(
    moe_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(kind=Kind.STALL, role=Role.TRAINER, rank=1, phase=Phase.TRAIN, folder=str(tmp_path))
    monkeypatch.setenv(VARIABLE, to_json(fault))
    command = [
        *(sys.executable, "-m", "tests.chaos.command", "run", str(RECIPES / "quickstart.yaml")),
        *(f"model.path={moe_model}", "trainer.total_training_steps=1", *SMALL, "rl_safe.timeouts.train=4"),
    ]
    outcome = finish(command, tmp_path / "run")
    assert outcome.code == 1, outcome.err
    assert outcome.left == []
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("hang: ")]
    assert re.fullmatch(
        r"hang: phase train, the trainers, \w+ of \w+: 0 arrived, 1 did not within [\d.]+ s; training rank 1 is at "
        rf"tests/chaos/striker\.py:\d+ \(_strike\); evidence in outputs/{outcome.run_dir.name}/hang",
        line,
    ), outcome.err
    evidence = outcome.run_dir / "hang"
    stacks = {"stack_trainer_0.txt", "stack_trainer_1.txt", "stack_rollout_0.txt"}
    assert {path.name for path in evidence.iterdir()} == {"verdict.json", *stacks, "flight_gloo_0", "flight_gloo_1"}
    for name in stacks:
        assert "most recent call first" in (evidence / name).read_text()
    found = json.loads((evidence / "verdict.json").read_text())
    assert found["verdict"] == line
    assert [actor["stack"]["is_in_a_call"] for actor in found["actors"]] == [False, True, False]
    assert [actor["state"] for actor in found["ray"]] == ["ALIVE"] * 3


@pytest.mark.every_case
def test_a_trainer_that_is_stopped_between_two_phases_is_named_and_the_run_ends_in_seconds(
    moe_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(kind=Kind.STOP, role=Role.TRAINER, rank=1, phase=Phase.ROLLOUT, folder=str(tmp_path))
    assert fault.finds_it_idle
    monkeypatch.setenv(VARIABLE, to_json(fault))
    command = [
        *(sys.executable, "-m", "tests.chaos.command", "run", str(RECIPES / "quickstart.yaml")),
        *(f"model.path={moe_model}", "trainer.total_training_steps=1", *SMALL, "rl_safe.timeouts.stopped=2"),
    ]
    outcome = finish(command, tmp_path / "run")
    ended_s = time.time()
    assert outcome.code == 1, outcome.err
    assert outcome.left == []
    assert re.search(r"training rank 1 \(process \d+\) is stopped \(SIGSTOP\)", outcome.err), outcome.err
    assert re.search(
        r"training rank 1 failed in phase \w+( at \S+:\d+ \(\S+\))?: "
        r"training rank 1 \(process \d+\) is stopped \(SIGSTOP\): it was ended after rl_safe\.timeouts\.stopped",
        outcome.last_error,
    ), outcome.err
    assert "why is not known" not in outcome.err
    assert ended_s - float(fault.struck.read_text()) < ENDS_S


@pytest.mark.every_case
def test_a_trainer_that_is_killed_is_told_with_what_is_known(
    moe_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(kind=Kind.KILL, role=Role.TRAINER, rank=1, phase=Phase.TRAIN, folder=str(tmp_path))
    monkeypatch.setenv(VARIABLE, to_json(fault))
    command = [
        *(sys.executable, "-m", "tests.chaos.command", "run", str(RECIPES / "quickstart.yaml")),
        *(f"model.path={moe_model}", "trainer.total_training_steps=1", *SMALL),
    ]
    outcome = finish(command, tmp_path / "run")
    assert outcome.code == 1, outcome.err
    assert outcome.left == []
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("training rank 1: why ")]
    assert "its log ends without a word" in line
    assert line.endswith(f": {ADVICE[Ended.SILENT_END]}")
