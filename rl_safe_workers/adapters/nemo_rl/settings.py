"""What NeMo RL's users can set: the node ``rl_safe`` of their YAML, and how it reaches the workers.

NeMo RL keeps top-level keys that it does not know, and hands its workers the node ``policy`` alone. So the driver
writes what was set into one environment variable of the policy's workers (``policy.megatron_cfg.env_vars``).
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_safe_workers.config import BootstrapConfig, CheckpointConfig, RlSafeConfig, TimeoutsConfig
from rl_safe_workers.errors import ConfigError

NODE = "rl_safe"
VARIABLE = "RL_SAFE_NEMO_RL"
"""The settings as JSON, e.g. ``{"timeouts": {"save": 600}}``."""
HOST_SHUTDOWN_S = 30.0
"""How long NeMo RL waits for ``shutdown()`` of its workers before it kills them (worker_groups.py:1066)."""
ABORT_S = 10.0
"""How much longer than its timeout a teardown may take, to abort what could not be destroyed."""


@dataclass(kw_only=True)
class NemoRlTimeouts:
    """Seconds that each phase may take."""

    world: float = 600.0
    """To create the default group, and for a collective outside of any phase."""
    bootstrap: float = 300.0
    convert: float = 3600.0
    """For the import of HF weights: loading, conversion and the save."""
    joint: float = 300.0
    """To join the communicator with the rollout ranks."""
    logprob: float = 1800.0
    train: float = 1800.0
    save: float = 1800.0
    teardown: float = 15.0


@dataclass(kw_only=True)
class NemoRlBootstrap:
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
class NemoRlSettings:
    """The node ``rl_safe``."""

    enabled: bool = True
    """Whether the policy's workers are ours; read by the driver alone."""
    timeouts: NemoRlTimeouts = field(default_factory=NemoRlTimeouts)
    bootstrap: NemoRlBootstrap = field(default_factory=NemoRlBootstrap)

    def rl_safe(self) -> RlSafeConfig:
        """The same as the node that the mixins share."""
        own = asdict(self.timeouts)
        return RlSafeConfig(
            timeouts=TimeoutsConfig(**own, groups=self.timeouts.bootstrap),
            bootstrap=BootstrapConfig(**asdict(self.bootstrap)),
            checkpoint=CheckpointConfig(),
        )

    def to_json(self) -> str:
        """For `from_json`, in another process."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str, *, source: str) -> NemoRlSettings:
        """Reads what `to_json` made, or a user wrote.

        Raises:
            ConfigError: If it is no JSON, or has an unknown key or a wrong value.
        """
        try:
            node = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{source} is not JSON: {error}") from None
        return read_node(node, source=source)


def worker_settings(environ: Mapping[str, str] | None = None) -> NemoRlSettings:
    """The settings that the driver gave this process; the defaults if it gave none.

    Raises:
        ConfigError: If the variable cannot be read.
    """
    return NemoRlSettings.from_json((os.environ if environ is None else environ).get(VARIABLE) or "{}", source=VARIABLE)


def read_node(node: Any, *, source: str = NODE) -> NemoRlSettings:
    """Reads the node's keys; None is an empty node.

    Raises:
        ConfigError: If it is no mapping, or a key is unknown, or has a value of the wrong type or out of range.
    """
    node = {} if node is None else node
    if not isinstance(node, Mapping):
        raise ConfigError(f"{source} must hold keys, such as {source}.timeouts.save: 600, and is {node!r}")
    known = dict(_walk(NemoRlSettings(), ""))
    for key in _keys(node, known):
        if key not in known:
            (nearest,) = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ConfigError(f"unknown key {source}.{key}; the nearest known key is {source}.{nearest}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(NemoRlSettings), dict(node))
        settings: NemoRlSettings = OmegaConf.to_object(merged)  # type: ignore[assignment]
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
        if isinstance(value, Mapping) and is_dataclass(known.get(key)):
            yield from _keys(value, known, f"{key}.")
        else:
            yield key


def _complaints(settings: NemoRlSettings) -> Iterator[str]:
    for key, value in _walk(settings.timeouts, "timeouts."):
        if not 0 < value < math.inf:
            yield f"{key}={value} must be a number above 0 and finite: nothing waits without a deadline"
    if settings.timeouts.bootstrap < 1.0:
        yield f"timeouts.bootstrap={settings.timeouts.bootstrap} must be at least 1"
    if settings.timeouts.teardown + ABORT_S >= HOST_SHUTDOWN_S:
        yield (
            f"timeouts.teardown={settings.timeouts.teardown} must be below {HOST_SHUTDOWN_S - ABORT_S:.0f}: NeMo RL "
            f"kills its workers {HOST_SHUTDOWN_S:.0f} s after it asked them to end, and an abort may take {ABORT_S:.0f}"
        )
    if settings.bootstrap.watch_steps < 0:
        yield f"bootstrap.watch_steps={settings.bootstrap.watch_steps} must be at least 0"
    for key, choices in {"on_missing": ("raise", "bootstrap"), "on_late": ("warn", "raise")}.items():
        if (value := getattr(settings.bootstrap, key)) not in choices:
            yield f"bootstrap.{key}={value} is not supported: use {' or '.join(choices)}"
