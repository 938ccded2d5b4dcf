"""How adapters read what a user set for them: by name, with types and bounds, refused on one line. Imports no torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_safe_workers.config import BootstrapConfig, MaxCtasConfig
from rl_safe_workers.contradictions import HEARING_S
from rl_safe_workers.errors import ConfigError, first_line
from rl_safe_workers.topology.budget import NCCL_MAXIMUM

T = TypeVar("T")


@dataclass(kw_only=True)
class BootstrapSettings:
    """The bootstrap of the communicators."""

    on_missing: str = "raise"
    """What an offload or a weight sync does if the bootstrap has not run: ``raise``, or ``bootstrap`` first."""
    budget: bool = True
    """Give groups that carry only scalars, or have one rank, a single NCCL channel, and those between pipeline stages
    12; false: NCCL's own number for all."""
    max_ctas: MaxCtasConfig = field(default_factory=MaxCtasConfig)
    """NCCL's channels at most, by Megatron's name of a group. Not of ``world``: the host makes the default group."""
    watch_steps: int = 3
    """In how many first updates each collective is looked at for device memory that it takes late; 0: never."""
    on_late: str = "warn"
    """What to do about it: ``warn`` or ``raise``."""

    def config(self) -> BootstrapConfig:
        """The same as the node that a `SafeTrainer` takes."""
        return BootstrapConfig(**{item.name: getattr(self, item.name) for item in fields(self)})


def read(kind: type[T], node: Mapping[str, Any], *, source: str) -> T:
    """Makes settings of a node's keys; bounds are the caller's to check.

    Args:
        kind: A dataclass, with a default for every field.
        node: What was set.
        source: The node's name, for errors.

    Raises:
        ConfigError: If a key is unknown, or has a value of the wrong type.
    """
    known = dict(_walk(kind(), ""))
    for key in _keys(node, known):
        if key not in known:
            (nearest,) = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ConfigError(f"unknown key {source}.{key}; the nearest known key is {source}.{nearest}")
    try:
        settings: T = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), dict(node)))  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        key = f".{error.full_key}" if error.full_key else ""
        raise ConfigError(f"{source}{key}: {first_line(error)}") from None
    return settings


def complaints(timeouts: Any, bootstrap: BootstrapSettings, **seconds: float) -> Iterator[str]:
    """What is out of range.

    Args:
        timeouts: A dataclass of seconds by phase, ``bootstrap`` among them.
        bootstrap: The other section.
        **seconds: More of them, by key.
    """
    for key, value in (*_walk(timeouts, "timeouts."), *seconds.items()):
        if not 0 < value < math.inf:
            yield f"{key}={value} must be a number above 0 and finite: nothing waits without a deadline"
    if timeouts.bootstrap < HEARING_S:
        yield f"timeouts.bootstrap={timeouts.bootstrap} must be at least {HEARING_S}"
    if bootstrap.watch_steps < 0:
        yield f"bootstrap.watch_steps={bootstrap.watch_steps} must be at least 0"
    yield from _complaints_of_limits(bootstrap.max_ctas.limits())
    for key, choices in {"on_missing": ("raise", "bootstrap"), "on_late": ("warn", "raise")}.items():
        if (value := getattr(bootstrap, key)) not in choices:
            yield f"bootstrap.{key}={value} is not supported: use {' or '.join(choices)}"


def _complaints_of_limits(limits: Mapping[str, int]) -> Iterator[str]:
    for key, limit in limits.items():
        if key == "world":
            yield f"bootstrap.max_ctas.world={limit} is not supported: the host makes the default group"
        elif not 1 <= limit <= NCCL_MAXIMUM:
            yield f"bootstrap.max_ctas.{key}={limit} must be from 1 to {NCCL_MAXIMUM} CTAs"


def _walk(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for item in fields(section):
        value = getattr(section, item.name)
        yield prefix + item.name, value
        if is_dataclass(value):
            yield from _walk(value, f"{prefix}{item.name}.")


def _keys(node: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and is_dataclass(known.get(key)):
            yield from _keys(value, known, f"{key}.")
        else:
            yield key
