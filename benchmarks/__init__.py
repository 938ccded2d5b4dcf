"""Measures the package's promises, each beside a peer. Not in the wheel; ``rl-safe bench NAME`` runs one benchmark."""
