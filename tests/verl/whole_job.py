"""verl's whole PPO job on this machine, as a command of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from rl_safe_workers.adapters.verl.environment import PLUGIN
from tests.verl.host import show

ROOT = Path(__file__).parents[2]
LIMIT_S = 720.0
"""How long a job may take on a busy machine. It takes some 60 s on an idle one."""


def run_job(
    folder: Path,
    *overrides: str,
    python: str = sys.executable,
    path: str = str(ROOT),
    modules: str = "",
    steps: int = 2,
) -> tuple[int, str]:
    """Runs the tiny recipe on CPU; returns the exit status and the output.

    Args:
        folder: An empty folder.
        *overrides: Further arguments.
        python: The interpreter.
        path: ``PYTHONPATH`` of every process.
        modules: Imported by verl in every process, beside our plugin.
        steps: Number of training steps.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "RL_SAFE"))}
    command = [
        *("bash", str(ROOT / "recipes/verl/quickstart.sh")),
        *("actor_rollout_ref.rollout.agent.num_workers=1", "reward.num_workers=1", "data.dataloader_num_workers=0"),
        f"+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH={path}",
        *(f"trainer.default_local_dir={folder}/checkpoints", f"hydra.run.dir={folder}/hydra"),
        f"trainer.total_training_steps={steps}",
        *overrides,
    ]
    settings = {"DEVICE": "cpu", "PYTHON": python, "PYTHONPATH": path, "RES_OPTIONS": "attempts:0"}
    if modules:
        settings["VERL_USE_EXTERNAL_MODULES"] = f"{PLUGIN},{modules}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=clean | settings, stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=15)
    output = (folder / "log").read_text()
    show(*(line[:600] for line in output.splitlines() if "phase " in line or "rl_safe: " in line))
    return status, output
