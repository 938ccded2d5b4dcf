"""Puts our parts into ms-swift's driver of Ray mode, which imports the plugin before it makes any actor."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from rl_safe_workers.adapters.swift.ray_waits import BoundedRay, RayWaits, calling
from rl_safe_workers.adapters.swift.swift_settings import SwiftSettings
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role

_RAY = "swift.ray.megatron"
_CACHE = "kv_cache"
"""The tag with which ms-swift has an engine allocate its KV cache."""


def install_driver(settings: SwiftSettings) -> RayWaits:
    """Replaces what the driver calls. Returns its waits.

    Args:
        settings: Ours.
    """
    waits = RayWaits(settings.timeouts)
    groups = _module("worker_group")
    for name, bounded in {
        "worker_group": BoundedRay(waits, "the training ranks", "outside"),
        "base_trainer": BoundedRay(waits, "generation", Phase.ROLLOUT),
        "rollout.replica": BoundedRay(waits, "the vLLM engines", Phase.SYNC),
        "checkpoint_engine.manager": BoundedRay(waits, "the weight sync", Phase.SYNC),
    }.items():
        _module(name).ray = bounded
    group, replica = groups.WorkerGroup, _module("rollout.replica").RolloutReplica
    group.__init__ = _noting_ranks(group.__init__, waits)
    group.execute = functools.wraps(group.execute)(calling(waits, settings.to_json())(group.execute))
    group.shutdown = _ending(group.shutdown, waits)
    replica._spawn_actors = _noting_engines(replica._spawn_actors, waits)
    replica._parallel_launch_all = classmethod(_launching(replica._parallel_launch_all.__func__, waits))
    manager = _module("checkpoint_engine.manager").CheckpointEngineManager
    manager.wake_up_rollout = _before_the_cache(manager.wake_up_rollout)
    _module("megatron_worker").MegatronWorker = importlib.import_module(
        "rl_safe_workers.adapters.swift.ray_worker"
    ).SafeMegatronWorker
    return waits


def _module(name: str) -> Any:
    return importlib.import_module(f"{_RAY}.{name}")


def _noting_ranks(original: Callable[..., None], waits: RayWaits) -> Callable[..., None]:
    @functools.wraps(original)
    def init(group: Any, name: str, worker_handles: list[Any]) -> None:
        original(group, name, worker_handles)
        waits.add(Role.TRAINER, worker_handles)

    return init


def _noting_engines(original: Callable[..., None], waits: RayWaits) -> Callable[..., None]:
    @functools.wraps(original)
    def spawn(replica: Any, *args: Any, **kwargs: Any) -> None:
        original(replica, *args, **kwargs)
        waits.add(Role.ROLLOUT, replica.servers)

    return spawn


def _launching(original: Callable[..., None], waits: RayWaits) -> Callable[..., None]:
    @functools.wraps(original)
    def launch(cls: type, replicas: list[Any]) -> None:
        with waits.waiting("the start of the vLLM engines", (Phase.START,)):
            original(cls, replicas)

    return launch


def _ending(original: Callable[..., None], waits: RayWaits) -> Callable[..., None]:
    """Wraps ``WorkerGroup.shutdown``: after a failure the workers are gone, and nobody asks them to end."""

    @functools.wraps(original)
    def shutdown(group: Any, *args: Any, **kwargs: Any) -> None:
        if waits.failure is None:
            original(group, *args, **kwargs)

    return shutdown


def _before_the_cache(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``wake_up_rollout``: the trainers give their communicators' memory before an engine takes its cache's."""

    @functools.wraps(original)
    def wake_up_rollout(manager: Any, tags: list[str] | None = None) -> None:
        if _CACHE in (tags or ()):
            manager._train_group.execute("give_comms")
        original(manager, tags)

    return wake_up_rollout
