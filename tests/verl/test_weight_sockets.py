"""Each job has sockets of its own for verl's weight syncs: their addresses at both ends, by verl's real classes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rl_safe_workers import env
from rl_safe_workers.adapters.verl.environment import PLUGIN
from rl_safe_workers.adapters.verl.weight_sockets import in_job_folder
from rl_safe_workers.reaping.processes import make_run_folder
from tests.verl.vllm_on_cpu import OF_VLLM, PYTHON, path_to_both

NAME = "rl-colocate-zmq-01000000-replica-1-rank-0.sock"
VERLS = f"ipc:///tmp/{NAME}"
BOTH_ENDS = """
import json, os, sys
from types import SimpleNamespace
import verl
import ray
ray.get_runtime_context = lambda: SimpleNamespace(get_job_id=lambda: "01000000")
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

os.environ.update(RANK="1", RAY_LOCAL_WORLD_SIZE="2", VERL_RAY_JOB_ID="01000000", VERL_REPLICA_RANK="1")
config = RolloutConfig(name="vllm", mode="async", tensor_model_parallel_size=1)
worker = SimpleNamespace(model_runner=None, local_rank=0)
found = []
for folder in sys.argv[1:]:
    os.environ["RL_SAFE_HANG_DIR"] = folder
    sender = ServerAdapter(config, None, None)
    found.append([sender.zmq_handle, vLLMColocateWorkerExtension._get_zmq_handle(worker)])
print(json.dumps(found))
"""


@pytest.mark.skipif(not (OF_VLLM / "vllm").is_dir(), reason="vLLM's environment is not there: scripts/setup test")
def test_both_ends_of_a_weight_sync_meet_in_the_folder_of_their_job(tmp_path: Path) -> None:
    # The folders of pytest have names that are too long for sockets.
    one, other = (make_run_folder("test") for _ in range(2))
    variables = {
        "PYTHONPATH": path_to_both(tmp_path),
        "VERL_ENGINE_VENDOR": "rl_safe",
        "VERL_PLATFORM": "rl_safe_cpu",
        "VERL_USE_EXTERNAL_MODULES": f"{PLUGIN},tests.verl.vllm_on_cpu",
    }
    command = [str(PYTHON), "-c", BOTH_ENDS, str(one), str(other), ""]
    try:
        result = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=120
        )
    finally:
        shutil.rmtree(one)
        shutil.rmtree(other)
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout.splitlines()[-1]) == [
        [f"ipc://{one}/{NAME}"] * 2,
        [f"ipc://{other}/{NAME}"] * 2,
        [VERLS] * 2,  # the job was not started by our entry
    ]


def test_an_address_stays_verls_where_the_folder_cannot_hold_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    for folder in (tmp_path / "missing", deep):
        monkeypatch.setenv(env.HANG_DIR, str(folder))
        assert in_job_folder(VERLS) == VERLS
    monkeypatch.setenv(env.HANG_DIR, str(tmp_path))
    assert in_job_folder("tcp://127.0.0.1:5555") == "tcp://127.0.0.1:5555"
