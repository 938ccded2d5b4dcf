"""verl with our Megatron engines, trainers and saves.

A run comes in by ``main_ppo.py``, a process of the job by ``plugin.py``, and an engine by ``engine.py``.
``settings.py`` reads the node ``actor_rollout_ref.rl_safe``.
"""
