"""Runs ms-swift's Megatron pipelines with our bootstrap, deadlines, saves and exit.

A job enters by ``plugin/rl_safe_swift_plugin.py``, which ms-swift imports before any group exists. ``python -m
rl_safe_workers.adapters.swift`` prints the plugin's path. ``install.py`` replaces names in ms-swift. ``job.py`` has the
`HostedTrainer` of a process.
"""
