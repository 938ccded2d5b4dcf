"""The settings of NeMo RL's users: the node ``rl_safe`` of their YAML, and its way to the workers.

NeMo RL keeps top-level keys that it does not know, and hands its workers the node ``policy`` alone. So the driver
writes what was set into one environment variable of the policy's workers (``policy.megatron_cfg.env_vars``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field

from rl_safe_workers.adapters.host_settings import ProvableSettings, RolloutTimeouts
from rl_safe_workers.config import Seconds

NODE = "rl_safe"
VARIABLE = "RL_SAFE_NEMO_RL"
"""The settings as JSON, e.g. ``{"timeouts": {"save": 600}}``."""
HOST_SHUTDOWN_S = 30.0
"""How long NeMo RL waits for ``shutdown()`` of its workers before it kills them (worker_groups.py:1066)."""
ABORT_S = 10.0
"""How much longer than its timeout a teardown may take, to abort what could not be destroyed."""


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
    """To create the default group, and for a collective outside of any phase."""
    convert: Seconds = 3600.0
    """For the import of HF weights: loading, conversion and the save."""
    joint: Seconds = 300.0
    """To join the communicator with the rollout ranks."""
    teardown: Annotated[Seconds, AfterValidator(_check_teardown)] = 15.0


class NemoRlSettings(ProvableSettings):
    """The node ``rl_safe``; the driver alone reads ``enabled``."""

    timeouts: NemoRlTimeouts = Field(default_factory=NemoRlTimeouts)


def worker_settings(environ: Mapping[str, str] | None = None) -> NemoRlSettings:
    """The settings that the driver gave this process; the defaults if it gave none.

    Raises:
        ConfigError: If the variable cannot be read.
    """
    return NemoRlSettings.from_json((os.environ if environ is None else environ).get(VARIABLE) or "{}", source=VARIABLE)
