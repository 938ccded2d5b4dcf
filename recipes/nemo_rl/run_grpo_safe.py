"""Runs NeMo RL's GRPO with our Megatron policy workers.

    NEMO_RL_SRC=/opt/nemo-rl python recipes/nemo_rl/run_grpo_safe.py --config RECIPE

It takes the arguments of NeMo RL's examples/run_grpo.py. The package must be importable; see docs/nemo_rl.md.
"""

from rl_safe_workers.adapters.nemo_rl.launch import main

if __name__ == "__main__":
    main()
