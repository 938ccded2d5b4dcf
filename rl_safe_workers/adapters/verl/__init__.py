"""Runs verl with our Megatron engines, trainers and saves.

A run enters by ``main_ppo.py``, each process of the job by ``plugin.py``, and each engine by ``engine.py``.
``settings.py`` reads the node ``actor_rollout_ref.rl_safe``.
"""
