"""Runs NeMo RL's non-colocated recipes with our Megatron policy workers.

A recipe enters by ``launch.py``, a worker by ``mixin.py``. ``nemo_rl_settings.py`` reads the node ``rl_safe``.
"""
