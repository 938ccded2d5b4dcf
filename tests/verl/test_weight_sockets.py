"""Two jobs on one machine send weights over sockets to which verl gives the same name, by verl's real classes."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import uuid
from pathlib import Path

import pytest

from rl_safe_workers.adapters.verl.environment import PLUGIN
from rl_safe_workers.reaping.processes import socket_folder
from tests.verl.vllm_on_cpu import OF_VLLM, PYTHON, path_to_both

TWO_JOBS = """
import asyncio, json, os, sys, threading
import torch
import verl
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender

ADDRESS, CPU = sys.argv[1], torch.device("cpu")
jobs = []
for number, run_id in enumerate(sys.argv[2:]):
    os.environ["RL_SAFE_RUN_ID"] = run_id
    sender = BucketedWeightSender(zmq_handle=ADDRESS, bucket_size_mb=1, use_shm=True)
    jobs.append((number, sender, BucketedWeightReceiver(ADDRESS, CPU, use_shm=True)))
received = {}

def send(number, sender):
    asyncio.run(sender.async_send_weights([("weight", torch.full((4,), float(number)))]))

def receive(number, receiver):
    receiver.receive_weights(lambda weights, is_last: received.setdefault(number, weights[0][1].tolist()))

threads = [threading.Thread(target=send, args=job[:2], daemon=True) for job in jobs]
threads += [threading.Thread(target=receive, args=job[::2], daemon=True) for job in reversed(jobs)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(20)
print(json.dumps([received.get(number) for number, *_ in jobs]))
"""


@pytest.mark.skipif(not (OF_VLLM / "vllm").is_dir(), reason="vLLM's environment is not there: scripts/setup test")
def test_each_job_gets_its_own_weights_though_verl_gives_both_the_same_sockets(tmp_path: Path) -> None:
    variables = {
        "PYTHONPATH": path_to_both(tmp_path),
        "VERL_ENGINE_VENDOR": "rl_safe",
        "VERL_PLATFORM": "rl_safe_cpu",
        "VERL_USE_EXTERNAL_MODULES": f"{PLUGIN},tests.verl.vllm_on_cpu",
    }
    run_ids = [uuid.uuid4().hex[:12] for _ in range(2)]
    address = f"ipc:///tmp/rl-colocate-zmq-test{run_ids[0]}-replica-0-rank-0.sock"
    command = [str(PYTHON), "-c", TWO_JOBS, address, *run_ids]
    try:
        result = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=120
        )
        folders = [folder for folder in map(socket_folder, run_ids) if folder.exists()]
        modes = [stat.filemode(folder.stat().st_mode) for folder in folders]
    finally:
        for run_id in run_ids:
            shutil.rmtree(socket_folder(run_id), ignore_errors=True)
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout.splitlines()[-1]) == [[0.0] * 4, [1.0] * 4]
    assert modes == ["drwx------"] * 2, "another user could take the sockets"
