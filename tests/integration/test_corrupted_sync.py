"""Whole runs in which a bit of a weight sync flips on its way: once the sync is redone, twice the run ends."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.integration.runs import RECIPES, SMALL, Outcome, finish

CORRUPTED = "model.layers.1.mlp.experts.3.down_proj.weight"


def _run(moe_model: Path, folder: Path, *, corrupted_syncs: int, prove: int = 1) -> Outcome:
    command = [
        *(sys.executable, "-m", "tests.integration.corrupted_command", str(corrupted_syncs)),
        *("run", str(RECIPES / "quickstart.yaml"), f"model.path={moe_model}", *SMALL, "trainer.save_freq=-1"),
        *("trainer.total_training_steps=2", f"rollout.prove_sync_freq={prove}"),
    ]
    return finish(command, folder)


@pytest.mark.every_case
def test_a_sync_that_is_corrupted_once_is_redone_and_the_run_goes_on(moe_model: Path, tmp_path: Path) -> None:
    outcome = _run(moe_model, tmp_path, corrupted_syncs=1)
    assert outcome.code == 0, outcome.err
    first, second = outcome.records
    assert (first["sync/redone"], second["sync/redone"]) == (1, 0)
    assert first["sync/proved"] == second["sync/proved"] > 0
    assert first["sync/not_proved"] == second["sync/not_proved"] == 0
    assert f"the weight sync is redone: rollout rank 0: {CORRUPTED}: sent " in outcome.out + outcome.err


def test_a_sync_that_is_corrupted_twice_ends_the_run_with_the_name_of_the_weight(
    moe_model: Path, tmp_path: Path
) -> None:
    outcome = _run(moe_model, tmp_path, corrupted_syncs=2)
    assert outcome.code == 1, outcome.err
    assert outcome.left == []
    assert re.fullmatch(
        rf"rl-safe: error: .*rollout rank 0: {re.escape(CORRUPTED)}: sent [0-9a-f]{{16}}, held [0-9a-f]{{16}}",
        outcome.last_error,
    ), outcome.err
