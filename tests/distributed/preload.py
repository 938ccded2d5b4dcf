"""Imports shared by every rank of the distributed tests (see ranks.PRELOAD).

pytest is one of them: a rank that unpickles a function of a test module imports that module, and pytest with it. That
took a quarter of a second of each rank.
"""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import mbridge  # noqa: F401
import pytest  # noqa: F401
import torch

import tests.distributed.worker  # noqa: F401

torch.set_num_threads(1)
# A collection in a rank would walk over all that was imported, and copy most of its pages: some 0.25 s each.
gc.collect()
gc.freeze()
