"""The settings of NeMo RL's users, in the node ``rl_safe`` of their YAML, and how they reach the workers.

NeMo RL keeps unknown top-level keys, but passes only the node ``policy`` to its workers. So the driver writes the
settings into an environment variable of the policy's workers (``policy.megatron_cfg.env_vars``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rl_safe_workers.adapters.host_settings import ProvableSettings, RolloutTimeouts
from rl_safe_workers.config import ABORT_S, Seconds

NODE = "rl_safe"
SETTING = f"{NODE}.{{}}"
"""Name of a setting in the node, with ``{}`` for its path."""
VARIABLE = "RL_SAFE_NEMO_RL"
"""The settings as JSON, e.g. ``{"timeouts": {"save": 600}}``."""
HOST_SHUTDOWN_S = 30.0
"""Seconds that NeMo RL waits for its workers' ``shutdown()`` before it kills them (worker_groups.py:1066)."""


def _check_teardown(seconds: float) -> float:
    if seconds + ABORT_S >= HOST_SHUTDOWN_S:
        raise ValueError(
            f"should be below {HOST_SHUTDOWN_S - ABORT_S:.0f}: NeMo RL kills its workers {HOST_SHUTDOWN_S:.0f} s after "
            f"it asked them to end, and an abort may take {ABORT_S:.0f}"
        )
    return seconds


class NemoRlTimeouts(RolloutTimeouts):
    """Seconds that each phase may take under NeMo RL."""

    world: Seconds = 600.0
    """Limit for creating the default group, and for a collective outside of any phase."""
    convert: Seconds = 3600.0
    """Limit for the import of HF weights: loading, conversion and the save."""
    joint: Seconds = 300.0
    """Limit for joining the communicator with the rollout ranks."""
    teardown: Annotated[Seconds, AfterValidator(_check_teardown)] = 15.0
    """Limit for ending the groups. NeMo RL kills its workers `HOST_SHUTDOWN_S` after it has asked them to end."""


class NemoRlSettings(ProvableSettings):
    """The node ``rl_safe``. Only the driver reads ``enabled``."""

    timeouts: NemoRlTimeouts = Field(default_factory=NemoRlTimeouts)
    refit_transport: Literal["host", "joint"] = "host"
    """How a refit sends weights: ``host`` as NeMo RL does; ``joint`` over our joint group, each weight from a rank that
    holds it, straight into the model of each vLLM worker. Only for engines on GPUs of their own."""
    refit_bucket_megabytes: Annotated[int, Field(ge=1, le=2**20)] = 512
    """Size in MiB of the buckets of ``refit_transport: joint``. Two are in memory on each side."""


def worker_settings(environ: Mapping[str, str] | None = None) -> NemoRlSettings:
    """Returns the settings that the driver gave this process; the defaults if it gave none.

    Raises:
        ConfigError: If the variable cannot be read.
    """
    return NemoRlSettings.from_json((os.environ if environ is None else environ).get(VARIABLE) or "{}", source=VARIABLE)
