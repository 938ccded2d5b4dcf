"""Going on from a checkpoint: the same bits, the same data, the same steps as if nothing had happened."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.checkpoint.folders.manifest import read_manifest
from tests.integration.conftest import SAVE_FREQ, TOTAL_STEPS
from tests.integration.runs import Outcome, files_under, finish, made_once, rl_safe

pytestmark = pytest.mark.timeout(600)  # the first test waits for the model and two whole runs

LAST_GOOD_STEP = 2 * SAVE_FREQ
EQUAL = ("reward/mean", "response_length/mean", "actor/loss", "actor/grad_norm", "rollout/logprob_gap_max")


def resume(moe_model: Path, *overrides: str) -> list[str]:
    return rl_safe(
        "quickstart.yaml",
        *(f"model.path={moe_model}", "trainer.resume_mode=auto", f"trainer.total_training_steps={TOTAL_STEPS}"),
        *(f"trainer.save_freq={SAVE_FREQ}", "rl_safe.checkpoint.digest=true", "rl_safe.checkpoint.keep_last=0"),
        *overrides,
    )


def copy_of_checkpoints(quickstart: Outcome, folder: Path) -> Path:
    root = folder / "checkpoints" / "quickstart"
    shutil.copytree(quickstart.folder / "checkpoints" / "quickstart", root)
    return root


def last_steps(outcome: Outcome) -> list[dict[str, Any]]:
    return [{key: record[key] for key in EQUAL} for record in outcome.records if record["step"] > LAST_GOOD_STEP]


@pytest.fixture(scope="module")
def resumed(quickstart: Outcome, moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The quickstart again, from its checkpoints, the last of which has lost a shard."""

    def make(folder: Path) -> Outcome:
        root = copy_of_checkpoints(quickstart, folder)
        (root / f"global_step_{TOTAL_STEPS}" / "dist_ckpt" / "__3_0.distcp").unlink()
        return finish(resume(moe_model), folder)

    outcome = made_once(tmp_path_factory, "resumed", make)
    assert outcome.code == 0, outcome.err
    return outcome


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(resumed: Outcome) -> None:
    assert [record["step"] for record in resumed.records] == list(range(LAST_GOOD_STEP + 1, TOTAL_STEPS + 1))


def test_the_steps_after_a_resume_are_those_of_the_uninterrupted_run(quickstart: Outcome, resumed: Outcome) -> None:
    for was, now in zip(last_steps(quickstart), last_steps(resumed), strict=True):
        assert now == pytest.approx(was, rel=0, abs=1e-6)


def test_rewards_after_a_resume_are_equal(quickstart: Outcome, resumed: Outcome) -> None:
    def rewards(outcome: Outcome) -> list[float]:
        return [record["reward/mean"] for record in last_steps(outcome)]

    assert rewards(resumed) == rewards(quickstart)


def test_model_optimizer_and_random_state_end_bit_equal(quickstart: Outcome, resumed: Outcome) -> None:
    last = Path("checkpoints", "quickstart", f"global_step_{TOTAL_STEPS}")
    was, now = read_manifest(quickstart.folder / last), read_manifest(resumed.folder / last)
    assert sorted(was.digests) == ["0", "1", "2", "3"]
    assert now.digests == was.digests
    assert len(set(was.digests.values())) == 4


def test_the_data_position_goes_on(quickstart: Outcome, resumed: Outcome) -> None:
    last = Path("checkpoints", "quickstart", f"global_step_{TOTAL_STEPS}")
    was, now = read_manifest(quickstart.folder / last), read_manifest(resumed.folder / last)
    assert now.driver_state == was.driver_state


def test_a_resumed_run_leaves_nothing_behind(resumed: Outcome) -> None:
    assert resumed.left == []


def test_a_run_that_is_complete_says_so_and_writes_nothing(
    quickstart: Outcome, moe_model: Path, tmp_path: Path
) -> None:
    copy_of_checkpoints(quickstart, tmp_path)
    before = files_under(tmp_path)
    outcome = finish(resume(moe_model), tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("nothing to do")
    assert f"is at step {TOTAL_STEPS} of {TOTAL_STEPS}" in outcome.out
    assert files_under(tmp_path) == before
    assert outcome.left == []
