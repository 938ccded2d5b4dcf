"""What verl's users can set: the node ``actor_rollout_ref.rl_safe``, and how it reaches the workers.

verl hands its workers some nodes of the run's configuration, and its engines none of them. So the driver writes what
was set into one environment variable of the job, which every process of the job has.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_safe_workers.config import BootstrapConfig, CheckpointConfig, RlSafeConfig, TimeoutsConfig
from rl_safe_workers.errors import ConfigError

NODE = "actor_rollout_ref.rl_safe"
STRATEGY = "megatron"
HEARING_S = 1.0
"""The least timeout of a bootstrap: ranks look every half second whether another one has given up."""


@dataclass(kw_only=True)
class VerlTimeouts:
    """Seconds that each phase may take."""

    bootstrap: float = 300.0
    load: float = 1800.0
    logprob: float = 1800.0
    train: float = 1800.0
    save: float = 1800.0
    teardown: float = 60.0


@dataclass(kw_only=True)
class VerlBootstrap:
    """The bootstrap of the communicators."""

    on_missing: str = "raise"
    """What an offload or a weight sync does if the bootstrap has not run: ``raise``, or ``bootstrap`` first."""
    budget: bool = True
    """Give groups that carry only scalars, or have one rank, a single NCCL channel, and those between pipeline stages
    12; false: NCCL's own number for all."""
    watch_steps: int = 3
    """In how many first updates each collective is looked at for device memory that it takes late; 0: never."""
    on_late: str = "warn"
    """What to do about it: ``warn`` or ``raise``."""


@dataclass(kw_only=True)
class VerlSettings:
    """The node ``actor_rollout_ref.rl_safe``."""

    enabled: bool = False
    """Whether Megatron engines are ours."""
    timeouts: VerlTimeouts = field(default_factory=VerlTimeouts)
    bootstrap: VerlBootstrap = field(default_factory=VerlBootstrap)
    nccl_timeout: float = 600.0
    """Seconds of one collective outside of these phases; taken from ``actor_rollout_ref.nccl_timeout``."""

    def rl_safe(self) -> RlSafeConfig:
        """The same as the node that the mixins share."""
        own = asdict(self.timeouts)
        return RlSafeConfig(
            timeouts=TimeoutsConfig(**own, world=self.nccl_timeout, groups=self.timeouts.bootstrap),
            bootstrap=BootstrapConfig(**asdict(self.bootstrap)),
            checkpoint=CheckpointConfig(),
        )

    def to_json(self) -> str:
        """For `from_json`, in another process."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str, *, source: str) -> VerlSettings:
        """Reads what `to_json` made, or a user wrote.

        Raises:
            ConfigError: If it is no JSON, or has an unknown key or a wrong value.
        """
        try:
            node = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{source} is not JSON: {error}") from None
        if not isinstance(node, dict):
            raise ConfigError(f"{source} must be a JSON object, such as {{}}, and is {text}")
        return read_node(node, source=source)


def read_settings(config: DictConfig) -> VerlSettings:
    """Reads a run's configuration, as verl's command line made it.

    Raises:
        ConfigError: If the node has an unknown key or a wrong value.
    """
    node = OmegaConf.select(config, NODE)
    given = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{NODE} must hold keys, such as {NODE}.enabled=true, and is {given!r}")
    if "nccl_timeout" in given:
        raise ConfigError(f"unknown key {NODE}.nccl_timeout: set actor_rollout_ref.nccl_timeout")
    timeout = OmegaConf.select(config, "actor_rollout_ref.nccl_timeout")
    if timeout is not None:
        given["nccl_timeout"] = timeout
    return read_node({str(key): value for key, value in given.items()}, source=NODE)


def read_node(node: Mapping[str, Any], *, source: str) -> VerlSettings:
    """Reads the node's own keys.

    Raises:
        ConfigError: If one is unknown, or has a value of the wrong type or out of range.
    """
    known = dict(_walk(VerlSettings(), ""))
    for key in _keys(node, known):
        if key not in known:
            (nearest,) = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ConfigError(f"unknown key {source}.{key}; the nearest known key is {source}.{nearest}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(VerlSettings), dict(node))
        settings: VerlSettings = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        key = f".{error.full_key}" if error.full_key else ""
        raise ConfigError(f"{source}{key}: {str(error).splitlines()[0]}") from None
    for complaint in _complaints(settings):
        raise ConfigError(f"{source}.{complaint}")
    return settings


def _walk(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for item in fields(section):
        value = getattr(section, item.name)
        yield prefix + item.name, value
        if is_dataclass(value):
            yield from _walk(value, f"{prefix}{item.name}.")


def _keys(node: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key in known and is_dataclass(known[key]):
            yield from _keys(value, known, f"{key}.")
        else:
            yield key


def _complaints(settings: VerlSettings) -> Iterator[str]:
    for key, value in (*_walk(settings.timeouts, "timeouts."), ("nccl_timeout", settings.nccl_timeout)):
        if not 0 < value < math.inf:
            yield f"{key}={value} must be a number above 0 and finite: nothing waits without a deadline"
    if settings.timeouts.bootstrap < HEARING_S:
        yield f"timeouts.bootstrap={settings.timeouts.bootstrap} must be at least {HEARING_S}"
    if settings.bootstrap.watch_steps < 0:
        yield f"bootstrap.watch_steps={settings.bootstrap.watch_steps} must be at least 0"
    for key, choices in {"on_missing": ("raise", "bootstrap"), "on_late": ("warn", "raise")}.items():
        if (value := getattr(settings.bootstrap, key)) not in choices:
            yield f"bootstrap.{key}={value} is not supported: use {' or '.join(choices)}"
