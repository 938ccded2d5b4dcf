"""The fault matrix: whatever goes wrong wherever, the run ends soon, says who it was, and loses and leaves nothing."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.audit import audit
from rl_safe_workers.checkpoint.manifest import complete_checkpoints, read_manifest
from tests.chaos.cases import FIRST_STEP, LAST_STEP, QUICK, SLACK_S, Case, all_cases
from tests.chaos.conftest import Results, chaos_command, checkpoints_of
from tests.chaos.plan import VARIABLE, Fault, Kind
from tests.integration.runs import Outcome, running

REWARD = "reward/mean"


def run_with(
    fault: Fault, case: Case, undisturbed: Outcome, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Outcome, float]:
    """Runs a case from a checkpoint of the undisturbed run; returns how it ended, and when, in Unix seconds."""
    first = f"global_step_{FIRST_STEP}"
    shutil.copytree(checkpoints_of(undisturbed.folder) / first, checkpoints_of(folder) / first)
    monkeypatch.setenv(VARIABLE, fault.to_json())
    with running(chaos_command(undisturbed.folder / "model", *case.overrides()), folder) as run:
        run.process.wait(150)
        ended_at = time.time()
        return run.finish(), ended_at


def assert_newest_checkpoint_is_undamaged(folder: Path, undisturbed: Outcome, steps: set[int]) -> None:
    newest, manifest = complete_checkpoints(checkpoints_of(folder))[0]
    assert manifest.step in steps
    as_it_was = read_manifest(checkpoints_of(undisturbed.folder) / f"global_step_{manifest.step}")
    assert manifest.digests == as_it_was.digests
    assert manifest.driver_state == as_it_was.driver_state
    assert audit(newest, deep=True).ok


def assert_failed(outcome: Outcome, case: Case) -> None:
    assert outcome.code == 1, outcome.err
    assert outcome.last_error.startswith("rl-safe: error: "), outcome.err
    assert outcome.err.count("rl-safe: error: ") == 1
    assert case.is_named_by(outcome.last_error), outcome.last_error
    if case.kind is Kind.RAISE:
        assert "RuntimeError: no luck" in outcome.last_error
        assert "Traceback" in outcome.err
    assert [record["step"] for record in outcome.records] == case.recorded_steps
    assert "failed: " in (outcome.run_dir / "report.html").read_text()
    assert list((outcome.run_dir / "ray_logs").glob("*"))


def assert_completed(outcome: Outcome, undisturbed: Outcome) -> None:
    assert outcome.code == 0, outcome.err
    expected = [(record["step"], record[REWARD]) for record in undisturbed.records if record["step"] > FIRST_STEP]
    assert [(record["step"], record[REWARD]) for record in outcome.records] == expected


@pytest.mark.timeout(400)  # the first one waits for the undisturbed run
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=() if case in QUICK else pytest.mark.chaos) for case in all_cases()]
)
def test_a_fault_ends_the_run_soon_and_cleanly_and_costs_no_checkpoint(
    case: Case, undisturbed: Outcome, results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results.seconds[case] = None
    fault = case.fault(tmp_path)
    outcome, ended_at = run_with(fault, case, undisturbed, tmp_path, monkeypatch)
    assert fault.struck.exists(), f"the fault never struck:\n{outcome.err}"
    seconds = ended_at - float(fault.struck.read_text())
    if case.restarts:
        assert_completed(outcome, undisturbed)
    else:
        assert_failed(outcome, case)
        assert seconds <= case.timeout_s + SLACK_S
    assert_newest_checkpoint_is_undamaged(tmp_path, undisturbed, {LAST_STEP} if case.restarts else case.saved_steps)
    assert outcome.left == []
    results.seconds[case] = seconds
