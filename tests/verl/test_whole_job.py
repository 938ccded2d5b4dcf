"""verl's whole PPO job on this machine, with rollout engines that have no model: it trains, or names who is silent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.verl.host import show

ROOT = Path(__file__).parents[2]
TIMEOUT_S, ALLOWED_S = 10.0, 10.0
"""The deadline, and how much later the job may have ended: verl polls every two seconds, and Ray has to end, too."""


def _job(folder: Path, *overrides: str, fault: str = "") -> tuple[int, str, float]:
    """Runs two steps; returns the exit status, the output, and seconds from the fault to the end.

    Args:
        folder: An empty folder.
        overrides: Further arguments.
        fault: The call of the second engine that has no answer, and the step of its weights.
    """
    (folder / "fault").write_text(fault)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "RL_SAFE"))}
    command = [
        *("bash", str(ROOT / "recipes/verl/quickstart.sh")),
        "actor_rollout_ref.model.external_lib=tests.verl.echo_rollout",
        "actor_rollout_ref.rollout.free_cache_engine=true",
        f"+actor_rollout_ref.rollout.custom.fault={folder}/fault",
        *("actor_rollout_ref.rollout.agent.num_workers=1", "reward.num_workers=1", "data.dataloader_num_workers=0"),
        f"+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH={ROOT}",
        *(f"trainer.default_local_dir={folder}/checkpoints", f"hydra.run.dir={folder}/hydra"),
        *("trainer.total_training_steps=2", "trainer.save_freq=2"),
        *overrides,
    ]
    environment = {**clean, "DEVICE": "cpu", "PYTHON": sys.executable, "RES_OPTIONS": "attempts:0"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            status = process.wait(timeout=540)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=15)
    since = folder / "fault.since"
    took_s = time.time() - float(since.read_text()) if since.exists() else 0.0
    output = (folder / "log").read_text()
    show(*(line[:600] for line in output.splitlines() if "phase " in line or "rl_safe: " in line))
    return status, output, took_s


@pytest.mark.timeout(600)
def test_a_job_trains_and_gives_its_communicators_away_between_updates(tmp_path) -> None:
    status, output, _ = _job(tmp_path, "actor_rollout_ref.rl_safe.release_comms=true")
    assert status == 0, output[-3000:]
    steps = re.findall(r"step:\d - .*rl_safe/active:1\.0.*timing_s/rl_safe_release:(\d+\.\d+)", output)
    assert len(steps) == 2
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "phase", "named"),
    [
        ("generate 1", "rollout", "rollout rank 1 of generation did not arrive"),
        ("wake_kv_cache 1", "sync", "rollout replica 1, awaited by training rank 1, did not finish"),
        ("sleep 1", "sync", "rollout rank 1 of the weight sync (sleep_replicas) did not arrive"),
    ],
    ids=["generation", "sync", "sleep"],
)
def test_an_engine_that_does_not_answer_ends_the_job_and_is_named(fault, phase, named, tmp_path) -> None:
    status, output, took_s = _job(tmp_path, f"actor_rollout_ref.rl_safe.timeouts.{phase}={TIMEOUT_S}", fault=fault)
    show(f"{fault}: ended {took_s:.1f} s after the fault")
    assert status not in (0, None)
    assert f"phase {phase}: {named} within" in output
    assert TIMEOUT_S <= took_s < TIMEOUT_S + ALLOWED_S
