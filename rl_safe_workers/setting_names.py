"""Names of our settings in errors, as the users of this process's job write them. Each host has other names."""

from __future__ import annotations

from collections.abc import Mapping

_pattern = "rl_safe.{}"
_timeouts: Mapping[str, str] = {}


def timeout_setting(phase: str) -> str:
    """Returns the name of the setting that moves a phase's deadline."""
    return _timeouts.get(str(phase)) or _pattern.format(f"timeouts.{phase}")


def bootstrap_setting(key: str) -> str:
    """Returns the name of a setting of the bootstrap.

    Args:
        key: The key in the node ``bootstrap``, also with its value, e.g. ``"max_ctas.ep=8"``.
    """
    return _pattern.format(f"bootstrap.{key}")


def name_settings(pattern: str, *, timeouts: Mapping[str, str]) -> None:
    """Sets the names that this module returns from now on in this process. Each adapter calls it once.

    Args:
        pattern: Name of a setting, with ``{}`` for its path in ``rl_safe``, e.g. ``"timeouts.save"``.
        timeouts: Full names of settings by phase, for phases whose timeout has another name in the host's
            configuration.
    """
    global _pattern, _timeouts
    _pattern, _timeouts = pattern, timeouts
