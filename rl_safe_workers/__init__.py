"""Megatron trainers that are safe beside vLLM in Ray-based RL training.

The public names load on first use, so that importing the package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rl_safe_workers.config import RunConfig
    from rl_safe_workers.errors import (
        CheckpointError,
        CheckpointMismatchError,
        ClusterError,
        CommunicatorError,
        ConfigError,
        DataError,
        DivergedError,
        Interrupted,
        JobError,
        LayoutError,
        LifecycleError,
        LogprobGapError,
        ModelError,
        NodeLostError,
        NodeMismatchError,
        PhaseTimeoutError,
        RankError,
        ResourceError,
        RewardFunctionError,
        RlSafeError,
        RolloutError,
        RunError,
        StoreLostError,
        UnsafeCheckpointError,
        UsageError,
        WeightSyncError,
    )
    from rl_safe_workers.lifecycle import Lifecycle, Phase
    from rl_safe_workers.ranks import RankId, Role
    from rl_safe_workers.recipe import load_recipe
    from rl_safe_workers.standalone import bootstrap, channel_limits, guard, teardown
    from rl_safe_workers.workers.actor import MegatronActorMixin

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "ClusterError",
    "CommunicatorError",
    "ConfigError",
    "DataError",
    "DivergedError",
    "Interrupted",
    "JobError",
    "LayoutError",
    "Lifecycle",
    "LifecycleError",
    "LogprobGapError",
    "MegatronActorMixin",
    "ModelError",
    "NodeLostError",
    "NodeMismatchError",
    "Phase",
    "PhaseTimeoutError",
    "RankError",
    "RankId",
    "ResourceError",
    "RewardFunctionError",
    "RlSafeError",
    "Role",
    "RolloutError",
    "RunConfig",
    "RunError",
    "StoreLostError",
    "UnsafeCheckpointError",
    "UsageError",
    "WeightSyncError",
    "__version__",
    "bootstrap",
    "channel_limits",
    "guard",
    "load_recipe",
    "teardown",
]

_OUTSIDE_ERRORS = {
    "Lifecycle": "lifecycle",
    "MegatronActorMixin": "workers.actor",
    "Phase": "lifecycle",
    "RankId": "ranks",
    "Role": "ranks",
    "RunConfig": "config",
    "bootstrap": "standalone",
    "channel_limits": "standalone",
    "guard": "standalone",
    "load_recipe": "recipe",
    "teardown": "standalone",
}
"""The module of each public name that is not an error class."""


def __getattr__(name: str) -> Any:
    """Loads a public name from the module that owns it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_OUTSIDE_ERRORS.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})
