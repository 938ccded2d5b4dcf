"""Translates each host framework's words and hooks, and holds a `SafeTrainer` for it.

A host's worker or trainer comes in; the same one leaves, with its phases under our deadlines. The modules here are for
all hosts; each host has a room. Only these rooms import ``verl``, ``nemo_rl`` or ``swift``.
"""
