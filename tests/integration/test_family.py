"""A run with a family that has biases, shared experts, a dense first layer and an MTP layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import Family, create_seeded_model
from tests.integration.runs import finish, rl_safe


@pytest.mark.every_case
def test_rollout_and_trainer_of_a_glm4_moe_agree_at_every_step(tmp_path: Path) -> None:
    model = tmp_path / "glm"
    create_seeded_model(model, SeededModelConfig(), family=Family.GLM4_MOE, settings={"num_nextn_predict_layers": 1})
    overrides = ("cluster.num_trainers=2", "trainer.total_training_steps=3", "trainer.save_freq=-1")
    outcome = finish(rl_safe("quickstart.yaml", f"model.path={model}", *overrides), tmp_path)
    assert outcome.code == 0, outcome.err
    gaps = [record["rollout/logprob_gap_max"] for record in outcome.records]
    assert len(gaps) == 3
    assert all(0 < gap <= 1e-5 for gap in gaps), gaps
