"""Imports shared by every rank of these tests; the environment must be as a job's before verl is imported."""

import gc
import os
import warnings

os.environ.update(
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TORCHDYNAMO_DISABLE="1",
    RAY_USAGE_STATS_ENABLED="0",
    VERL_PLATFORM="rl_safe_cpu",
    VERL_ENGINE_VENDOR="rl_safe",
    VERL_USE_EXTERNAL_MODULES="rl_safe_workers.adapters.verl.plugin",
)
warnings.simplefilter("ignore")

import torch  # noqa: E402
import verl.workers.engine  # noqa: E402
import verl.workers.engine_workers  # noqa: E402, F401

torch.set_num_threads(1)
# As in tests/distributed/preload.py.
gc.collect()
gc.freeze()
