"""Runs that fail: the culprit is named last on stderr, the exit code is 1, and nothing stays alive.

Ranks that die, raise, or never arrive are in tests/chaos. Checks within a step are in tests/unit/test_grpo.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.runs import SMALL, Outcome, finish, rl_safe

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


def assert_failed(outcome: Outcome, message: str) -> None:
    assert outcome.code == 1, outcome.err
    assert re.match(f"rl-safe: error: {message}", outcome.last_error), outcome.err
    assert outcome.err.count("rl-safe: error: ") == 1
    assert "failed: " in (outcome.run_dir / "report.html").read_text()
    assert outcome.left == []


@pytest.mark.every_case
def test_a_rollout_rank_that_raises_is_named(moe_model: Path, tmp_path: Path) -> None:
    # As long as the longest message, which is all that is counted before the start: the chat template adds to it.
    command = rl_safe("quickstart.yaml", f"model.path={moe_model}", STEPS, *SMALL, "data.max_prompt_length=22")
    outcome = finish(command, tmp_path)
    where = r"at rl_safe_workers/rollout/\S+:\d+ \(\w+\)"
    assert_failed(outcome, f"rollout rank 0 failed in phase rollout {where}: DataError: prompt 0 of step 1 has ")
    assert outcome.records == []


@pytest.mark.every_case
def test_a_reward_function_that_raises_ends_the_run(moe_model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    command = rl_safe("quickstart.yaml", f"model.path={moe_model}", STEPS, *SMALL, "reward.function=mine:reward")
    outcome = finish(command, tmp_path)
    assert_failed(outcome, r"reward function mine:reward raised KeyError: 'no such thing' at mine.py:8 \(reward\) for ")
    assert [record["step"] for record in outcome.records] == [1]
