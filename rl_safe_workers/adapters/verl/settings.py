"""What verl's users can set: the node ``actor_rollout_ref.rl_safe``, and how it reaches the workers.

verl hands its workers some nodes of the run's configuration, and its engines none of them. So the driver writes what
was set into one environment variable of the job, which every process of the job has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_safe_workers.adapters.reading import BootstrapSettings, complaints, read
from rl_safe_workers.adapters.verl.features import dispatcher_of
from rl_safe_workers.config import CheckpointConfig, RlSafeConfig, TimeoutsConfig
from rl_safe_workers.errors import ConfigError

NODE = "actor_rollout_ref.rl_safe"
STRATEGY = "megatron"
DELTA = "delta_sharded"
"""verl's checkpoint engine that sends changes of weights."""
TAKEN = {
    "nccl_timeout": "actor_rollout_ref.nccl_timeout",
    "delta_weights": "actor_rollout_ref.rollout.checkpoint_engine.backend",
    "dispatchers": "moe_token_dispatcher_type in each engine's override_transformer_config",
}
"""Keys of the settings that are no keys of the node, and where in verl's configuration they come from."""


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
class VerlSettings:
    """The node ``actor_rollout_ref.rl_safe``."""

    enabled: bool = False
    """Whether Megatron engines are ours."""
    timeouts: VerlTimeouts = field(default_factory=VerlTimeouts)
    bootstrap: BootstrapSettings = field(default_factory=BootstrapSettings)
    nccl_timeout: float = 600.0
    """Seconds of one collective outside of these phases; see `TAKEN`."""
    delta_weights: bool = False
    """Whether the rollout is sent changes of weights, which verl gathers over further groups; see `TAKEN`."""
    dispatchers: list[str] = field(default_factory=list)
    """Token dispatchers of all engines of the job, which may share groups; empty if not known; see `TAKEN`."""

    def rl_safe(self) -> RlSafeConfig:
        """The same as the node that a `SafeTrainer` takes."""
        own = asdict(self.timeouts)
        return RlSafeConfig(
            timeouts=TimeoutsConfig(**own, world=self.nccl_timeout, groups=self.timeouts.bootstrap),
            bootstrap=self.bootstrap.config(),
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
    for key, place in TAKEN.items():
        if key in given:
            raise ConfigError(f"unknown key {NODE}.{key}: set {place}")
    return read_node({**{str(key): value for key, value in given.items()}, **_taken(config)}, source=NODE)


def engine_nodes(config: DictConfig) -> list[str]:
    """Where a run's configuration describes the engines that it will have."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    found = ["actor_rollout_ref.actor"]
    if need_reference_policy(config):
        found.append("actor_rollout_ref.ref")
    if need_critic(config):
        found.append("critic")
    return found


def _taken(config: DictConfig) -> dict[str, Any]:
    """What of `TAKEN` the configuration says."""
    overrides = [
        OmegaConf.select(config, f"{node}.megatron.override_transformer_config") or {} for node in engine_nodes(config)
    ]
    found: dict[str, Any] = {
        "dispatchers": sorted({dispatcher_of(override) for override in overrides}),
        "delta_weights": OmegaConf.select(config, TAKEN["delta_weights"]) == DELTA,
    }
    timeout = OmegaConf.select(config, TAKEN["nccl_timeout"])
    return found if timeout is None else {**found, "nccl_timeout": timeout}


def read_node(node: Mapping[str, Any], *, source: str) -> VerlSettings:
    """Reads the node's own keys.

    Raises:
        ConfigError: If one is unknown, or has a value of the wrong type or out of range.
    """
    settings = read(VerlSettings, node, source=source)
    for complaint in complaints(settings.timeouts, settings.bootstrap, nccl_timeout=settings.nccl_timeout):
        raise ConfigError(f"{source}.{complaint}")
    return settings
