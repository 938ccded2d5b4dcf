"""Imports shared by every rank of the distributed tests (see ranks.PRELOAD)."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import mbridge  # noqa: F401
import torch

import rl_safe_workers.models.bridge
import rl_safe_workers.trainer.policy
import rl_safe_workers.workers.actor  # noqa: F401

torch.set_num_threads(1)
