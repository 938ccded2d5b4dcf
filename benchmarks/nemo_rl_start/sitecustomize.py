"""Starts the meter in each process of a metered job of NeMo RL, which has this folder on ``PYTHONPATH``."""

from benchmarks.nemo_rl_meter import meter

meter()
