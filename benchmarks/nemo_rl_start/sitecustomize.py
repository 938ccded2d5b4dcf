"""Python runs this at the start of each process of a metered job of NeMo RL, where this folder is on ``PYTHONPATH``."""

from benchmarks.nemo_rl_meter import meter

meter()
