"""What the package promises, measured beside what others do. Not in the wheel; ``rl-safe bench NAME`` runs one."""
