"""A fault in a run of the built-in driver: two trainers, one vLLM rollout rank."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.diagnosis.host import TIMEOUT_S, Fault, Seen, ended, told, variables
from tests.integration.runs import RECIPES, SMALL

STEPS = 2
_MODEL = Path(tempfile.gettempdir()) / "rl_safe_test_diagnosis_model"


def run(fault: Fault, folder: Path) -> Seen:
    """Runs the quickstart recipe until the fault has ended it; its root cause is the error's line, or the hang's."""
    recipe = [sys.executable, "-m", "rl_safe_workers", "run", str(RECIPES / "quickstart.yaml")]
    model = [f"model.path={_model(recipe, folder)}"]
    if fault.phase == "load":
        first = [*recipe, *model, *SMALL, "trainer.total_training_steps=1", "trainer.save_freq=1"]
        subprocess.run(first, cwd=folder, check=True, capture_output=True, timeout=200)
    command = [
        *(*recipe, *model, *SMALL, f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1"),
        f"rl_safe.timeouts.{fault.phase}={TIMEOUT_S}",
        *(["trainer.resume_mode=auto"] if fault.phase == "load" else []),
    ]
    with tempfile.TemporaryDirectory(prefix="t") as temp:  # the paths of Ray's sockets must stay short
        status, output, after_s = ended(command, {**variables(fault, folder), "TMPDIR": temp}, folder)
    hang, _, _ = told(output, r"^(hang: .*)$")
    error, _, _ = told(output, r"^rl-safe: error: (.*)$")
    folders = sorted(folder.glob("outputs/*/hang"))
    return Seen(hang or error, "", str(folders[-1]) if folders else "", after_s, output, status)


def _model(recipe: list[str], folder: Path) -> Path:
    """Returns the model of all cells, made by a short run the first time."""
    with (_MODEL.parent / f"{_MODEL.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _MODEL.exists():
            (folder / "making").mkdir()
            made = [*recipe, f"model.path={_MODEL}", "model.create={}", *SMALL, "trainer.total_training_steps=1"]
            subprocess.run(made, cwd=folder / "making", check=True, capture_output=True, timeout=200)
    return _MODEL
