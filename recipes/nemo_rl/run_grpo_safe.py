"""Runs NeMo RL's GRPO with our Megatron policy workers.

    NEMO_RL_SRC=/opt/nemo-rl python recipes/nemo_rl/run_grpo_safe.py --config RECIPE

It takes the arguments of NeMo RL's examples/run_grpo.py. The package must be importable; see docs/nemo_rl.md.
"""

import os

# NeMo RL turns this hook of Ray off when it is imported. Ray reads the variable when it is imported, and we import Ray
# first. With the hook, Ray would start every worker by `uv run`, if the driver was started so.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

from rl_safe_workers.adapters.nemo_rl.launch import main

if __name__ == "__main__":
    main()
