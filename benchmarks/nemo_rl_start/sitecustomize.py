"""Starts the meter in each process of a metered job of NeMo RL, which has this folder on ``PYTHONPATH``."""

import os

from benchmarks.nemo_rl_meter import meter

_VISIBLE = "CUDA_VISIBLE_DEVICES"

meter()
visible = os.environ.get(_VISIBLE, "").split(",")
if "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in os.environ and all(map(str.isdecimal, visible)):
    # NeMo RL's policy workers take Ray's number of their GPU for CUDA's (megatron_policy_worker.py:441). In a job that
    # has only GPUs 2 and 3 the two differ, unless these workers see GPUs 0 and 1, too. Only they have this variable,
    # because the engines of these jobs have one GPU each.
    os.environ[_VISIBLE] = ",".join(map(str, range(1 + max(map(int, visible)))))
