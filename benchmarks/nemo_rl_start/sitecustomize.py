"""Starts the meter in each process of a metered job of NeMo RL, which has this folder on ``PYTHONPATH``."""

import os

from benchmarks.nemo_rl_meter import meter

_VISIBLE = "CUDA_VISIBLE_DEVICES"

if "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in os.environ and (visible := os.environ.get(_VISIBLE)):
    # NeMo RL's policy workers take Ray's number of their GPU for CUDA's (megatron_policy_worker.py:441). The two differ
    # in a job that has only the GPUs 2 and 3, unless its workers see GPUs 0 and 1, too.
    os.environ[_VISIBLE] = ",".join(map(str, range(1 + max(map(int, visible.split(","))))))

meter()
