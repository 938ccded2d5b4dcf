"""With deterministic settings two runs of the same steps end with the same bits."""

from __future__ import annotations

from pathlib import Path

from benchmarks import gpu
from rl_safe_workers import env
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model


def test_the_same_steps_give_the_same_bits(tmp_path: Path) -> None:
    create_seeded_model(tmp_path / "model", SeededModelConfig(), dtype="bfloat16")
    overrides = [f"model.path={tmp_path / 'model'}", "data.max_response_length=448"]
    digests = {gpu.run_ranks("repeatable_steps", overrides, variables=env.DETERMINISTIC)["digest"] for _ in range(2)}
    assert len(digests) == 1
