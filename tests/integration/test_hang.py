"""A run that hangs or loses a rank: one line says who is missing and where, or why it died."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from rl_safe_workers.diagnostics.log_lines import ADVICE
from rl_safe_workers.diagnostics.log_lines import Fault as Ended
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role
from tests.chaos.plan import VARIABLE, Fault, Kind, to_json
from tests.integration.runs import RECIPES, SMALL, finish


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
        r"hang: phase train, the trainers, \w+ of \w+: 0 arrived, 1 did not within [\d.]+ s; trainer rank 1 is at "
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
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("trainer rank 1: why ")]
    assert "its log ends without a word" in line
    assert line.endswith(f": {ADVICE[Ended.SILENT_END]}")
