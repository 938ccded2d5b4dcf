"""What NeMo RL's users can set: the node ``rl_safe`` of their YAML, and how it reaches the workers.

NeMo RL keeps top-level keys that it does not know, and hands its workers the node ``policy`` alone. So the driver
writes what was set into one environment variable of the policy's workers (``policy.megatron_cfg.env_vars``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rl_safe_workers.adapters.reading import BootstrapSettings, complaints, read
from rl_safe_workers.config import CheckpointConfig, RlSafeConfig, TimeoutsConfig
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
class NemoRlSettings:
    """The node ``rl_safe``."""

    enabled: bool = True
    """Whether the policy's workers are ours; read by the driver alone."""
    timeouts: NemoRlTimeouts = field(default_factory=NemoRlTimeouts)
    bootstrap: BootstrapSettings = field(default_factory=BootstrapSettings)

    def rl_safe(self) -> RlSafeConfig:
        """The same as the node that a `SafeTrainer` takes."""
        own = asdict(self.timeouts)
        return RlSafeConfig(
            timeouts=TimeoutsConfig(**own, groups=self.timeouts.bootstrap),
            bootstrap=self.bootstrap.config(),
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
    settings = read(NemoRlSettings, node, source=source)
    for complaint in (*complaints(settings.timeouts, settings.bootstrap), *_late(settings.timeouts.teardown)):
        raise ConfigError(f"{source}.{complaint}")
    return settings


def _late(teardown_s: float) -> Iterator[str]:
    if teardown_s + ABORT_S >= HOST_SHUTDOWN_S:
        yield (
            f"timeouts.teardown={teardown_s} must be below {HOST_SHUTDOWN_S - ABORT_S:.0f}: NeMo RL "
            f"kills its workers {HOST_SHUTDOWN_S:.0f} s after it asked them to end, and an abort may take {ABORT_S:.0f}"
        )
