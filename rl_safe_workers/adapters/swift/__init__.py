"""ms-swift's Megatron pipelines with our bootstrap, deadlines, saves and exit.

A job comes in by ``plugin/rl_safe_swift_plugin.py``, which ms-swift imports before any group exists; ``python -m
rl_safe_workers.adapters.swift`` prints its path. ``install.py`` replaces names of ms-swift's, and ``job.py`` holds this
process's `HostedTrainer`.
"""
