"""Patches ms-swift's driver of Ray mode. The driver imports the plugin before it makes any actor."""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_safe_workers import env
from rl_safe_workers.adapters.driver_waits import Party
from rl_safe_workers.adapters.job_processes import FAILED_KILL_AFTER_S, KILL_AFTER_S, JobProcesses
from rl_safe_workers.adapters.swift.ray_waits import BoundedRay, RayStandIn, RayWaits, calling
from rl_safe_workers.adapters.swift.swift_settings import SwiftSettings
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ports import port_to_listen_on
from rl_safe_workers.ranks import RankId, Role, trainer_id

_RAY = "swift.ray.megatron"
_FAILED = 1
"""Python's exit status for an error."""
_CACHE = "kv_cache"
"""The tag with which ms-swift tells an engine to allocate its KV cache."""


def install_driver(settings: SwiftSettings) -> RayWaits:
    """Replaces functions that the driver calls. Returns the driver's waits.

    Args:
        settings: The adapter's settings.
    """
    run_id = uuid.uuid4().hex[:12]
    job = RayJob(run_id, settings.timeouts.stopped)
    waits = job.waits = RayWaits(settings.timeouts, Path(f"rl_safe_failure_{run_id}").absolute())
    pipeline = _module("pipeline")
    pipeline.ray = job
    pipeline.MegatronRayPipeline._create_pools = _knowing_the_folder(pipeline.MegatronRayPipeline._create_pools, job)
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
    group._discover_master = staticmethod(_at_a_lasting_port(group._discover_master, waits))
    replica._spawn_actors = _noting_engines(replica._spawn_actors, waits)
    replica._parallel_launch_all = classmethod(_launching(replica._parallel_launch_all.__func__, waits))
    manager = _module("checkpoint_engine.manager").CheckpointEngineManager
    manager.wake_up_rollout = _before_the_cache(manager.wake_up_rollout)
    _module("megatron_worker").MegatronWorker = importlib.import_module(
        "rl_safe_workers.adapters.swift.ray_worker"
    ).SafeMegatronWorker
    if settings.prove_sync_freq >= 0:
        importlib.import_module("rl_safe_workers.adapters.swift.ray_proofs").prove_syncs(
            waits, every=settings.prove_sync_freq
        )
    return waits


class RayJob(RayStandIn):
    """Replaces ``ray`` to start Ray and shut it down. The job's processes end with the shutdown."""

    def __init__(self, run_id: str, stop_limit_s: float) -> None:
        """Marks this process's children, and begins to look after the job's processes on this machine.

        Args:
            run_id: The mark of the job's processes.
            stop_limit_s: See `JobProcesses.watch_nodes`.
        """
        super().__init__()
        self._stop_limit_s = stop_limit_s
        self.waits: RayWaits
        self._processes: JobProcesses | None = JobProcesses(run_id)
        self._variables = {env.RUN_ID: run_id, env.HANG_DIR: str(self._processes.folder)}
        env.mark_run(run_id, hang_dir=self._processes.folder)
        atexit.register(self._end)

    def _end(self) -> None:
        """Ends the job when this process ends. After a failure it exits at once, like `job_processes.exiting_at_once`.

        In that case, atexit functions from before the import of the plugin do not run. One of them is Ray's, but Ray is
        already shut down.
        """
        self.shutdown()
        if self.waits.failure is not None:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_FAILED)

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Calls ``ray.init``. The actors get the job's mark, even in a cluster that this job has not started."""
        started = ray.init(*args, runtime_env={"env_vars": self._variables}, **kwargs)
        assert self._processes is not None, "the job begins once"
        self._processes.watch_nodes(self._stop_limit_s)
        return started

    def shutdown(self) -> None:
        """Shuts Ray down and ends all processes of the job, on every node. Idempotent."""
        processes, self._processes = self._processes, None
        if processes is not None:
            processes.end(kill_after_s=KILL_AFTER_S if self.waits.failure is None else FAILED_KILL_AFTER_S)


def _knowing_the_folder(original: Callable[[Any], None], job: RayJob) -> Callable[[Any], None]:
    """Wraps ``_create_pools``, to put evidence beside the checkpoints. Before this call, no actor exists."""

    @functools.wraps(original)
    def create_pools(pipeline: Any) -> None:
        folder = Path(pipeline._data_info["_driver_args"].output_dir).absolute()
        job.waits.evidence = folder / job.waits.evidence.name
        original(pipeline)

    return create_pools


def _module(name: str) -> Any:
    return importlib.import_module(f"{_RAY}.{name}")


def _noting_ranks(original: Callable[..., None], waits: RayWaits) -> Callable[..., None]:
    @functools.wraps(original)
    def init(group: Any, name: str, worker_handles: list[Any]) -> None:
        original(group, name, worker_handles)
        waits.parties += [
            Party(f"training rank {rank}", trainer_id(rank), worker, worker.__ray_ready__.remote)
            for rank, worker in enumerate(worker_handles)
        ]

    return init


def _noting_engines(original: Callable[..., None], waits: RayWaits) -> Callable[..., None]:
    @functools.wraps(original)
    def spawn(replica: Any, *args: Any, **kwargs: Any) -> None:
        original(replica, *args, **kwargs)
        rank_id = RankId(Role.ROLLOUT, replica.replica_rank)
        waits.parties += [
            Party(f"the vLLM engine of replica {rank_id.rank}", rank_id, server, server.get_master_address.remote)
            for server in replica.servers
        ]

    return spawn


def _launching(original: Callable[..., None], waits: RayWaits) -> Callable[..., None]:
    @functools.wraps(original)
    def launch(cls: type, replicas: list[Any]) -> None:
        with waits.waiting("the start of the vLLM engines", (Phase.START,)):
            original(cls, replicas)

    return launch


def _at_a_lasting_port(original: Callable[[Any], tuple[str, int]], waits: RayWaits) -> Callable[[Any], tuple[str, int]]:
    """Wraps ``_discover_master``, to return a port for the ranks' store that stays free until rank 0 listens on it."""

    @functools.wraps(original)
    def discover_master(pool: Any) -> tuple[str, int]:
        address, _ = original(pool)
        first = PlacementGroupSchedulingStrategy(placement_group=pool.pgs[0], placement_group_bundle_index=0)
        port = ray.remote(port_to_listen_on).options(num_cpus=0.01, scheduling_strategy=first).remote()
        return address, int(waits.get(port, "a port for the training ranks' store", (Phase.START,)))

    return discover_master


def _ending(original: Callable[..., None], waits: RayWaits) -> Callable[..., None]:
    """Wraps ``WorkerGroup.shutdown``, to skip it after a failure, when the workers have already ended."""

    @functools.wraps(original)
    def shutdown(group: Any, *args: Any, **kwargs: Any) -> None:
        if waits.failure is None:
            original(group, *args, **kwargs)

    return shutdown


def _before_the_cache(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``wake_up_rollout``: trainers give away communicators' memory before an engine allocates its cache."""

    @functools.wraps(original)
    def wake_up_rollout(manager: Any, tags: list[str] | None = None) -> None:
        if _CACHE in (tags or ()):
            manager._train_group.execute("give_comms")
        original(manager, tags)

    return wake_up_rollout
