from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.integration.runs import RECIPES, Outcome, finish, made_once

TOTAL_STEPS, SAVE_FREQ = 10, 4

RECORD_MODULES = """
import json, sys
from pathlib import Path
from rl_safe_workers.cli.main import main
code = main(sys.argv[1:])
Path("modules.json").write_text(json.dumps(sorted(sys.modules)))
sys.exit(code)
"""
"""The ``rl-safe`` command, which then tells what it has imported."""


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's Qwen3-MoE."""
    path = tmp_path_factory.mktemp("models") / "moe"
    subprocess.run(
        [sys.executable, "-m", "rl_safe_workers.models.seeded", str(path), "{}", "float32"], check=True, timeout=120
    )
    return path


@pytest.fixture(scope="session")
def quickstart(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The quickstart, cut to ten steps with saves after 4, 8 and 10, in the background and each with digests."""
    command = [
        *(sys.executable, "-c", RECORD_MODULES, "run", str(RECIPES / "quickstart.yaml"), f"model.path={moe_model}"),
        *(f"trainer.total_training_steps={TOTAL_STEPS}", f"trainer.save_freq={SAVE_FREQ}"),
        *("rl_safe.checkpoint.digest=true", "rl_safe.checkpoint.keep_last=0", "rl_safe.checkpoint.async_save=true"),
    ]
    outcome = made_once(tmp_path_factory, "quickstart", partial(finish, command))
    assert outcome.code == 0, outcome.err
    return outcome
