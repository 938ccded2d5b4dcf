"""The settings that every host framework has, with the models and ranges of the built-in trainer. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, field_validator

from rl_safe_workers.config import BootstrapConfig, PhaseTimeouts, RlSafeConfig, Seconds, TimeoutsConfig
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.section import Contradiction, Section, read


class RolloutTimeouts(PhaseTimeouts):
    """Seconds that each phase may take under a host whose driver also waits for the rollout."""

    sync: Seconds = 600.0
    """To send the rollout its weights, and to put its engines to sleep or wake them up."""
    rollout: Seconds = 3600.0
    """Longest time without a response that ends."""


class HostSettings(Section):
    """A host's node of settings. Subclasses add the host's own keys, and its phases to ``timeouts``."""

    enabled: bool = True
    """True if the host's Megatron workers are ours."""
    timeouts: PhaseTimeouts = Field(default_factory=PhaseTimeouts)
    bootstrap: BootstrapConfig = Field(default_factory=BootstrapConfig)

    @field_validator("bootstrap")
    @classmethod
    def _refuse_limit_of_world(cls, bootstrap: BootstrapConfig) -> BootstrapConfig:
        if bootstrap.max_ctas.world is not None:
            raise Contradiction("max_ctas.world cannot have a limit: the host makes the default group")
        return bootstrap

    def rl_safe(self, **timeouts: float) -> RlSafeConfig:
        """Returns the node that a `SafeTrainer` takes. Creating the groups has the timeout of their bootstrap.

        Args:
            **timeouts: Seconds of phases that the host's own settings state elsewhere.
        """
        seconds = {"groups": self.timeouts.bootstrap, **self.timeouts.model_dump(), **timeouts}
        return RlSafeConfig(timeouts=TimeoutsConfig(**seconds), bootstrap=self.bootstrap)

    def to_json(self) -> str:
        """Returns text for `from_json` in another process."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    @classmethod
    def from_json(cls, text: str, *, source: str) -> Self:
        """Reads the text of `to_json`, or a user's.

        Args:
            text: A JSON object.
            source: The variable that holds it, for errors.

        Raises:
            ConfigError: If it is no JSON, or has an unknown key or a wrong value.
        """
        try:
            node = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{source} is not JSON: {error}") from None
        return cls.read(node, source=source)

    @classmethod
    def read(cls, node: Any, *, source: str) -> Self:
        """Reads a node's keys; None is an empty node.

        Raises:
            ConfigError: If it is no mapping, or has an unknown key or a wrong value.
        """
        node = {} if node is None else node
        if not isinstance(node, Mapping):
            raise ConfigError(f"{source} must hold keys, such as {source}.timeouts.save=600, and is {node!r:.200}")
        return read(cls, node, node=source)


class ProvableSettings(HostSettings):
    """The settings of a host whose weight syncs can be proved."""

    prove_sync_freq: Annotated[int, Field(ge=-1, le=10**9)] = -1
    """Read weights back after the first weight sync and every so many after it, and compare them with what was sent;
    1: after all, 0: after the first, -1: never."""
