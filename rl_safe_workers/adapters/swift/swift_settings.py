"""The settings of ms-swift's users, in the variable ``RL_SAFE_SWIFT``. The node ``ENV`` of a YAML can set it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pydantic import Field

from rl_safe_workers.adapters.host_settings import ProvableSettings
from rl_safe_workers.config import PhaseTimeouts, Seconds

VARIABLE = "RL_SAFE_SWIFT"
"""The settings as JSON, e.g. ``{"timeouts": {"save": 600}}``."""
SETTING = f"{{}} in {VARIABLE}"
"""Name of a setting, with ``{}`` for its path in the JSON."""


class SwiftTimeouts(PhaseTimeouts):
    """Seconds that each phase may take under ms-swift."""

    world: Seconds = 600.0
    """Limit for creating the default group."""
    outside: Seconds = 7200.0
    """Limit for each wait outside of phases. In one such wait, ranks wait while a rank prepares the dataset."""
    convert: Seconds = 3600.0
    """Limit for building the model and reading its weights, and for an export."""
    start: Seconds = 1800.0
    """Limit for starting vLLM and, in Ray mode, the processes of the job."""
    rollout: Seconds = 3600.0
    """Limit for generation and rewards."""
    sync: Seconds = 1800.0
    """Limit for sending weights to vLLM."""


class SwiftSettings(ProvableSettings):
    """The keys of the variable. If ``enabled`` is false, the plugin does nothing."""

    timeouts: SwiftTimeouts = Field(default_factory=SwiftTimeouts)
    release_comms: bool = False
    """True if communicators give their memory to vLLM on the same GPUs during generation."""


def job_settings(environ: Mapping[str, str] | None = None) -> SwiftSettings:
    """Returns the settings of this job, or the defaults if the variable is not set.

    Raises:
        ConfigError: If the variable cannot be read.
    """
    return SwiftSettings.from_json((os.environ if environ is None else environ).get(VARIABLE) or "{}", source=VARIABLE)
