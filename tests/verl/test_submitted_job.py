"""The small recipe as a job of a Ray cluster on this machine, with rollout engines that have no model."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.runs import REPOSITORY
from tests.nodes.local_cluster import LocalCluster, local_cluster

START_S = 600.0
"""How long a job may take on a busy machine until its agent loops have their first prompts."""
SILENT_S = 5.0
"""How long the job hangs before it is stopped."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(1, cpus=16, gpus=2) as found:
        yield found


def _submit(
    cluster: LocalCluster, folder: Path, name: str, *overrides: str, fault: str = ""
) -> subprocess.Popen[bytes]:
    """Starts the recipe with ``SUBMIT=1``; its output goes to ``folder/log``."""
    (folder / "fault").write_text(fault)
    command = [
        *("bash", "recipes/verl/quickstart.sh", "actor_rollout_ref.model.external_lib=tests.verl.echo_rollout"),
        "actor_rollout_ref.rollout.free_cache_engine=true",
        f"+actor_rollout_ref.rollout.custom.fault={folder}/fault",
        *("actor_rollout_ref.rollout.agent.num_workers=1", "reward.num_workers=1", "data.dataloader_num_workers=0"),
        *(f"trainer.default_local_dir={folder}/checkpoints", f"hydra.run.dir={folder}/hydra"),
        *("trainer.total_training_steps=2", "trainer.save_freq=2", *overrides),
    ]
    own = {
        "SUBMIT": "1",
        "SUBMISSION": name,
        "DEVICE": "cpu",
        "PYTHON": sys.executable,
        "RAY_ADDRESS": cluster.dashboard,
        "RES_OPTIONS": "attempts:0",
    }
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=REPOSITORY, env=cluster.environment | own, stdout=log, stderr=log)


@pytest.mark.timeout(START_S + 120)
def test_the_recipe_succeeds_as_a_job_and_gives_its_communicators_away_between_updates(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    process = _submit(cluster, tmp_path, "verl_recipe", "actor_rollout_ref.rl_safe.release_comms=true")
    status, output = process.wait(timeout=START_S + 60), (tmp_path / "log").read_text()
    assert status == 0, output[-3000:]
    assert len(re.findall(r"step:\d - .*rl_safe/active:1\.0.*timing_s/rl_safe_release:\d+\.\d+", output)) == 2
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"
    assert cluster.left_of_runs() == []


@pytest.mark.timeout(START_S + 120)
@pytest.mark.every_case
def test_a_hanging_job_that_is_stopped_leaves_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    process = _submit(cluster, tmp_path, "verl_hang", fault="generate 1")
    since = tmp_path / "fault.since"
    deadline = time.monotonic() + START_S
    while not since.exists():
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.2)
    time.sleep(SILENT_S)
    assert process.poll() is None, "the job does not hang"
    stopped = cluster.job("stop", "verl_hang")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    process.wait(timeout=60)
    assert "STOPPED" in cluster.job("status", "verl_hang").stdout.upper()
    assert cluster.left_of_runs() == []
