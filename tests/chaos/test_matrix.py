"""The fault matrix: whatever goes wrong wherever, the run ends soon, says who it was, and loses and leaves nothing."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.audit import audit
from rl_safe_workers.checkpoint.folders.manifest import complete_checkpoints, read_manifest
from tests.chaos.cases import FIRST_STEP, LAST_STEP, QUICK, QUICK_CHAIN, SLACK_S, Case, all_cases, chains
from tests.chaos.conftest import SECONDS, chaos_command, checkpoints_of
from tests.chaos.plan import VARIABLE, Fault, Kind, to_json
from tests.integration.runs import Outcome, Running, running

REWARD = "reward/mean"
ATTEMPT_S = 250.0
"""Longest time of one attempt."""
Record = Callable[[str, object], None]


def run_with(
    faults: Sequence[Fault],
    overrides: Sequence[str],
    undisturbed: Outcome,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[Running], object] = lambda run: None,
    *,
    prefix: Sequence[str] = (),
) -> tuple[Outcome, float]:
    """Runs on from a checkpoint of the undisturbed run; returns how that ended, and when, in Unix seconds.

    Args:
        faults: That strike its ranks.
        overrides: Of the recipe.
        undisturbed: The run that it goes on from.
        folder: Its working directory.
        monkeypatch: The test's.
        meanwhile: Called once the run has been started.
        prefix: Begins the command line.
    """
    first = f"global_step_{FIRST_STEP}"
    shutil.copytree(checkpoints_of(undisturbed.folder) / first, checkpoints_of(folder) / first)
    monkeypatch.setenv(VARIABLE, to_json(*faults))
    with running([*prefix, *chaos_command(undisturbed.folder / "model", *overrides)], folder) as run:
        meanwhile(run)
        run.process.wait(ATTEMPT_S * (len(faults) + 1))
        ended_at = time.time()
        return run.finish(), ended_at


def assert_newest_checkpoint_is_undamaged(folder: Path, undisturbed: Outcome, steps: set[int]) -> None:
    newest, manifest = complete_checkpoints(checkpoints_of(folder))[0]
    assert manifest.step in steps
    assert_checkpoint_is_undamaged(newest, undisturbed)


def assert_checkpoint_is_undamaged(path: Path, undisturbed: Outcome) -> None:
    manifest = read_manifest(path)
    as_it_was = read_manifest(checkpoints_of(undisturbed.folder) / f"global_step_{manifest.step}")
    assert manifest.digests == as_it_was.digests
    assert manifest.driver_state == as_it_was.driver_state
    assert audit(path, deep=True).ok


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


def named_at_restarts(outcome: Outcome) -> list[str]:
    """Returns the failures that the restarts name; the console breaks lines."""
    words = " ".join(outcome.out.split())
    return re.findall(r"restart \d+ of \d+, from .*?, after: (.*?)(?=restart \d+ of|$)", words)


def seconds_from(fault: Fault, ended_at: float) -> float:
    """How long it took from the fault until the run was in that phase again, or at its end."""
    again_at = float(fault.again.read_text()) if fault.again.exists() else ended_at
    return again_at - float(fault.struck.read_text())


@pytest.mark.timeout(400)  # the first one waits for the undisturbed run
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if case in QUICK else pytest.mark.chaos)
        for case in all_cases()
        if not case.restarts
    ],
)
def test_a_fault_ends_the_run_soon_and_cleanly_and_costs_no_checkpoint(
    case: Case, undisturbed: Outcome, record_property: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_property(SECONDS, (str(case), None))
    fault = case.fault(tmp_path)
    outcome, ended_at = run_with([fault], case.overrides(), undisturbed, tmp_path, monkeypatch)
    assert fault.struck.exists(), f"the fault never struck:\n{outcome.err}"
    seconds = seconds_from(fault, ended_at)
    assert_failed(outcome, case)
    assert seconds <= case.timeout_s + SLACK_S
    assert_newest_checkpoint_is_undamaged(tmp_path, undisturbed, case.saved_steps)
    assert outcome.left == []
    record_property(SECONDS, (str(case), seconds))


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(QUICK_CHAIN, id="quick"),
        *(pytest.param(chain, id=str(chain[0]), marks=pytest.mark.chaos) for chain in chains()),
    ],
)
def test_a_run_that_may_start_again_ends_as_it_would_have_ended(
    chain: Sequence[Case],
    undisturbed: Outcome,
    record_property: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for case in chain:
        record_property(SECONDS, (str(case), None))
    faults = [case.fault(tmp_path, number) for number, case in enumerate(chain)]
    overrides = [*chain[0].overrides(), f"rl_safe.restarts={len(chain)}"]
    outcome, ended_at = run_with(faults, overrides, undisturbed, tmp_path, monkeypatch)
    assert all(fault.struck.exists() for fault in faults), f"a fault never struck:\n{outcome.out}\n{outcome.err}"
    assert_completed(outcome, undisturbed)
    errors = named_at_restarts(outcome)
    assert len(errors) == len(chain)
    assert [str(case) for case, error in zip(chain, errors, strict=True) if not case.is_named_by(error)] == [], errors
    assert_newest_checkpoint_is_undamaged(tmp_path, undisturbed, {LAST_STEP})
    assert outcome.left == []
    for case, fault in zip(chain, faults, strict=True):
        record_property(SECONDS, (str(case), seconds_from(fault, ended_at)))
