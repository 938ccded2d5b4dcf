"""The package's promises, each measured beside its peer. Not in the wheel; ``rl-safe bench NAME`` runs one."""
