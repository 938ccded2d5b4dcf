"""Settings that all host frameworks share. They reuse the built-in trainer's models and ranges. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, field_validator

from rl_safe_workers.config import BootstrapConfig, PhaseTimeouts, RlSafeConfig, Seconds, TimeoutsConfig
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.section import Contradiction, Section, read
from rl_safe_workers.setting_names import name_settings


def name_host_settings(pattern: str, **timeouts: str) -> None:
    """Makes errors in this process name settings as the host's users write them; see `setting_names.name_settings`.

    Args:
        pattern: Name of a setting, with ``{}`` for its path in the host's node.
        **timeouts: Full names of timeouts by phase. Phase ``groups`` is named as ``bootstrap``, whose timeout it has.
    """
    name_settings(pattern, timeouts={"groups": pattern.format("timeouts.bootstrap"), **timeouts})


class RolloutTimeouts(PhaseTimeouts):
    """Seconds that each phase may take under a host whose driver also waits for the rollout."""

    sync: Seconds = 600.0
    """Limit for a weight sync to the rollout, and for putting its engines to sleep or waking them up."""
    rollout: Seconds = 3600.0
    """Longest time in which no response finishes."""


class HostSettings(Section):
    """A host's node of settings. Subclasses add the host's own keys, and its phases to ``timeouts``."""

    enabled: bool = True
    """True if our Megatron workers replace the host's."""
    timeouts: PhaseTimeouts = Field(default_factory=PhaseTimeouts)
    bootstrap: BootstrapConfig = Field(default_factory=BootstrapConfig)

    @field_validator("bootstrap")
    @classmethod
    def _refuse_limit_of_world(cls, bootstrap: BootstrapConfig) -> BootstrapConfig:
        if bootstrap.max_ctas.world is not None:
            raise Contradiction("max_ctas.world cannot have a limit: the host makes the default group")
        return bootstrap

    def rl_safe(self, **timeouts: float) -> RlSafeConfig:
        """Returns the settings for a `SafeTrainer`. Phase ``groups`` gets the timeout of ``bootstrap``.

        Args:
            **timeouts: Timeouts in seconds, by phase, that come from other settings of the host.
        """
        phases = set(TimeoutsConfig.model_fields)  # a host may have timeouts for other waits
        seconds = {"groups": self.timeouts.bootstrap, **self.timeouts.model_dump(include=phases), **timeouts}
        return RlSafeConfig(timeouts=TimeoutsConfig(**seconds), bootstrap=self.bootstrap)

    def to_json(self) -> str:
        """Returns the settings as JSON, for `from_json` in another process."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str, *, source: str) -> Self:
        """Reads settings from JSON, written by `to_json` or by a user.

        Args:
            text: A JSON object.
            source: The variable that holds it, for errors.

        Raises:
            ConfigError: If the text is not JSON, or has an unknown key or a wrong value.
        """
        try:
            node = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{source} is not JSON: {error}") from None
        return cls.read(node, source=source)

    @classmethod
    def read(cls, node: Any, *, source: str) -> Self:
        """Reads settings from a node; None counts as an empty node.

        Raises:
            ConfigError: If the node is not a mapping, or has an unknown key or a wrong value.
        """
        node = {} if node is None else node
        if not isinstance(node, Mapping):
            raise ConfigError(f"{source} must hold keys, such as {source}.timeouts.save=600, and is {node!r:.200}")
        return read(cls, node, node=source)


class ProvableSettings(HostSettings):
    """The settings of a host whose weight syncs can be proved."""

    prove_sync_freq: Annotated[int, Field(ge=-1, le=10**9)] = -1
    """Interval of proved weight syncs, the first one included. A proof reads weights back and compares them with the
    weights that were sent. 1: every sync; 0: the first only; -1: none."""
