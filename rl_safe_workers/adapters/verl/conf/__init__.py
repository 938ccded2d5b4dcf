"""The Hydra group ``rl_safe`` of verl's configuration, as files."""
