"""Connects each host framework to this package: maps its settings and hooks, and holds a `SafeTrainer` for it.

An adapter takes a host's worker or trainer, and puts its phases under our deadlines. The modules here are for all
hosts. Each host has a folder of its own. Only these folders import ``verl``, ``nemo_rl`` or ``swift``.
"""
