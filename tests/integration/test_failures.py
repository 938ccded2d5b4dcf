"""Runs that fail: the culprit is named last on stderr, the exit code is 1, and nothing stays alive."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.runs import RECIPES, SMALL, Outcome, finish, rl_safe

STEPS = "trainer.total_training_steps=3"
REWARD = """
calls = 0

def reward(data_source, solution_str, ground_truth, extra_info):
    global calls
    calls += 1
    if calls > 4:  # the samples of the first step
        raise KeyError("no such thing")
    return calls
"""


def with_fault(fault: str, moe_model: Path, folder: Path, *overrides: str) -> Outcome:
    command = [
        *(sys.executable, "-m", "tests.integration.faulty_command", fault, "run", str(RECIPES / "quickstart.yaml")),
        *(f"model.path={moe_model}", STEPS, *SMALL, *overrides),
    ]
    return finish(command, folder)


def assert_failed(outcome: Outcome, message: str) -> None:
    assert outcome.code == 1, outcome.err
    assert outcome.last_error.startswith(f"rl-safe: error: {message}"), outcome.err
    assert outcome.err.count("rl-safe: error: ") == 1
    assert "failed: " in (outcome.run_dir / "report.html").read_text()
    assert outcome.left == []


def seconds_of(outcome: Outcome, phase: str) -> float:
    """What the table at the end says of a phase."""
    (row,) = [line for line in outcome.out.splitlines() if line.startswith(f"│ {phase} ")]
    return float(row.split("│")[3])


def test_a_trainer_that_raises_is_named_though_others_wait_for_it(moe_model: Path, tmp_path: Path) -> None:
    outcome = with_fault("raise", moe_model, tmp_path)
    assert_failed(outcome, "trainer rank 1 failed in phase train: ValueError: no luck on this rank")
    assert "in update_policy" in outcome.err  # the trace of that rank
    assert [record["step"] for record in outcome.records] == [1]
    assert seconds_of(outcome, "train") < 10  # of 1800
    assert list((outcome.run_dir / "ray_logs").glob("*"))


def test_a_trainer_that_dies_is_named(moe_model: Path, tmp_path: Path) -> None:
    outcome = with_fault("die", moe_model, tmp_path)
    assert_failed(outcome, "trainer rank 1 failed in phase train: the process died")
    assert seconds_of(outcome, "train") < 10


def test_a_trainer_that_never_arrives_is_named_at_the_deadline(moe_model: Path, tmp_path: Path) -> None:
    outcome = with_fault("stall", moe_model, tmp_path, "rl_safe.timeouts.train=4")
    assert_failed(outcome, "phase train: rank 1 of ")
    assert outcome.last_error.endswith("to wait longer raise rl_safe.timeouts.train")
    assert seconds_of(outcome, "train") < 4 + 5 + 2


def test_a_rollout_rank_that_raises_is_named(moe_model: Path, tmp_path: Path) -> None:
    command = rl_safe("quickstart.yaml", f"model.path={moe_model}", STEPS, *SMALL, "data.max_prompt_length=2")
    outcome = finish(command, tmp_path)
    assert_failed(outcome, "rollout rank 0 failed in phase rollout: DataError: prompt 0 of step 1 has ")
    assert outcome.records == []


def test_a_reward_function_that_raises_ends_the_run(moe_model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    command = rl_safe("quickstart.yaml", f"model.path={moe_model}", STEPS, *SMALL, "reward.function=mine:reward")
    outcome = finish(command, tmp_path)
    assert_failed(outcome, "reward function mine:reward raised KeyError: 'no such thing' for ")
    assert [record["step"] for record in outcome.records] == [1]


def test_a_log_probability_gap_above_the_bound_ends_the_run(moe_model: Path, tmp_path: Path) -> None:
    command = rl_safe("quickstart.yaml", f"model.path={moe_model}", STEPS, *SMALL, "rollout.max_logprob_gap=1e-12")
    outcome = finish(command, tmp_path)
    assert_failed(outcome, "step 1: log-probability gap ")
    assert "exceeds 1e-12" in outcome.last_error
    assert outcome.records == []
