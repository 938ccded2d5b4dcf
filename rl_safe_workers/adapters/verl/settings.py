"""Reads the settings of verl's users from the node ``actor_rollout_ref.rl_safe``, and passes them to the workers.

verl passes some nodes of the run's configuration to its workers, and none to its engines. So the driver writes the
settings into an environment variable, which every process of the job inherits.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from rl_safe_workers.adapters.host_settings import ProvableSettings, RolloutTimeouts
from rl_safe_workers.config import RlSafeConfig, Seconds
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.topology.groups import dispatcher_of

NODE = "actor_rollout_ref.rl_safe"
SETTING = f"{NODE}.{{}}"
"""Name of a setting in the node, with ``{}`` for its path."""
STRATEGY = "megatron"
DELTA = "delta_sharded"
"""Name of verl's checkpoint engine that sends only changes of weights."""
TAKEN = {
    "nccl_timeout": "actor_rollout_ref.nccl_timeout",
    "bucket_megabytes": "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    "delta_weights": "actor_rollout_ref.rollout.checkpoint_engine.backend",
    "dispatchers": "moe_token_dispatcher_type in each engine's override_transformer_config",
}
"""Settings that a user cannot set in the node, each with the place in verl's configuration that it is read from."""


class VerlTimeouts(RolloutTimeouts):
    """Seconds that each phase may take under verl."""

    load: Seconds = 1800.0


class VerlSettings(ProvableSettings):
    """The node ``actor_rollout_ref.rl_safe``."""

    enabled: bool = False
    """True if our Megatron engines replace verl's."""
    timeouts: VerlTimeouts = Field(default_factory=VerlTimeouts)
    release_comms: bool = False
    """True if communicators give their memory to the rollout engines on the same GPUs while the engines are awake."""
    packed_sync: bool = False
    """True if weight syncs send each weight once, in buckets, from a training rank that has it."""
    nccl_timeout: Seconds = 600.0
    """Timeout, in seconds, of one collective outside of the phases; see `TAKEN`."""
    bucket_megabytes: int = 2048
    """Size of verl's buckets for weights, in MiB; see `TAKEN`."""
    delta_weights: bool = False
    """True if weight syncs send only changes of weights, which verl gathers over more groups; see `TAKEN`."""
    dispatchers: list[str] = Field(default_factory=list)
    """Token dispatchers of all engines of the job, which may share groups; empty if not known; see `TAKEN`."""

    def rl_safe(self, **timeouts: float) -> RlSafeConfig:
        """Returns the settings for a `SafeTrainer`."""
        return super().rl_safe(world=self.nccl_timeout, **timeouts)


def read_settings(config: DictConfig) -> VerlSettings:
    """Reads our settings from a run's configuration, as verl's command line made it.

    Raises:
        ConfigError: If the node has an unknown key or a wrong value.
    """
    return _read(config, _taken(config))


def read_sft_settings(config: DictConfig) -> VerlSettings:
    """Reads our settings from the configuration of verl's trainer for supervised fine-tuning.

    A collective outside of phases may take as long as a save, because the other ranks wait in it for rank 0's upload.

    Raises:
        ConfigError: As `read_settings`.
    """
    overrides = OmegaConf.select(config, "engine.override_transformer_config") or {}
    settings = _read(config, {"dispatchers": [dispatcher_of(overrides.get("moe_token_dispatcher_type"))]})
    return settings.model_copy(update={"nccl_timeout": settings.timeouts.save})


def _read(config: DictConfig, taken: dict[str, Any]) -> VerlSettings:
    node = OmegaConf.select(config, NODE)
    given = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{NODE} must hold keys, such as {NODE}.enabled=true, and is {given!r:.200}")
    if given and "enabled" not in given:
        raise ConfigError(f"{NODE} has settings, but no {NODE}.enabled: set it to true for our engines, or to false")
    for key, place in TAKEN.items():
        if key in given:
            raise ConfigError(f"unknown key {NODE}.{key}: set {place}")
    return VerlSettings.read({**given, **taken}, source=NODE)


def engine_nodes(config: DictConfig) -> list[str]:
    """Returns the nodes of a run's configuration that describe the engines of the run."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    found = ["actor_rollout_ref.actor"]
    if need_reference_policy(config):
        found.append("actor_rollout_ref.ref")
    if need_critic(config):
        found.append("critic")
    return found


def _taken(config: DictConfig) -> dict[str, Any]:
    """Returns the settings of `TAKEN` that verl's configuration contains."""
    overrides = [
        OmegaConf.select(config, f"{node}.megatron.override_transformer_config") or {} for node in engine_nodes(config)
    ]
    found: dict[str, Any] = {
        "dispatchers": sorted({dispatcher_of(each.get("moe_token_dispatcher_type")) for each in overrides}),
        "delta_weights": OmegaConf.select(config, TAKEN["delta_weights"]) == DELTA,
    }
    for key in ("nccl_timeout", "bucket_megabytes"):
        if (value := OmegaConf.select(config, TAKEN[key])) is not None:
            found[key] = value
    return found
