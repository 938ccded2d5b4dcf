"""Ray for one run: started on the loopback interface, and taken down until nothing is left."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_safe_workers import env
from rl_safe_workers.config import ClusterConfig, RunConfig
from rl_safe_workers.driver.actor_group import ActorRef
from rl_safe_workers.driver.actors import ActorShell, RolloutActor, TrainerActor
from rl_safe_workers.driver.cleanup import attempt
from rl_safe_workers.driver.interrupts import SLICE_S, Interrupts
from rl_safe_workers.errors import ClusterError, PhaseTimeoutError, ResourceError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.reaping.guardian import Guardian
from rl_safe_workers.reaping.ipc_files import remove_ipc_files
from rl_safe_workers.reaping.processes import (
    RUN_FILE,
    TEMP_PREFIX,
    ended,
    process_namespace,
    reap,
    remove_leftovers,
    run_processes,
)

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 256 * 2**20
"""Ray's shared memory for a local run; only token batches pass through it."""
GPU_SHARE = 0.5
"""Of a trainer and of the rollout rank on its GPU, as Ray counts; neither is held to it."""
LESS_OF = {
    "CPU": ", cluster.cpus_per_trainer or cluster.cpus_per_rollout",
    "GPU": ", or set cluster.colocated=true",
}
"""How else to need less."""


class Cluster:
    """The Ray side of a run. `close` is safe at any point, and more than once.

    Attributes:
        trainers: Trainer actors by training rank.
        rollouts: Rollout actors by rollout rank.
    """

    def __init__(self, config: RunConfig, *, run_id: str, interrupts: Interrupts) -> None:
        """Starts nothing yet."""
        self._config, self._run_id, self._interrupts = config, run_id, interrupts
        self._group: PlacementGroup | None = None
        self._temp_dir: Path | None = None
        self._hang_dir: Path | None = None
        self._pids: set[int] = set()
        self._guardian: Guardian | None = None
        self._made_at = time.time()
        self.trainers: list[ActorRef] = []
        self.rollouts: list[ActorRef] = []

    @property
    def is_local(self) -> bool:
        """Whether Ray is ours: started for this run and ended with it."""
        return self._config.cluster.ray_address == "local"

    @property
    def actors(self) -> list[ActorRef]:
        """Trainers, then rollout actors."""
        return [*self.trainers, *self.rollouts]

    def guard(self) -> None:
        """From now on everything with the run's mark ends, even if this process is killed. Idempotent."""
        if self._guardian is None:
            kill_after_s = self._config.rl_safe.teardown.kill_after_s
            self._guardian = Guardian(self._run_id, since_s=self._made_at, kill_after_s=kill_after_s)

    def _tell(self, *, pids: Iterable[int] = (), folders: Iterable[Path] = ()) -> None:
        if self._guardian is not None:
            self._guardian.tell(pids=pids, folders=folders)

    def start(self) -> None:
        """Starts or joins Ray, reserves every actor's place at once, and creates the actors.

        Raises:
            ResourceError: If the cluster has fewer CPUs than the run asks for.
            PhaseTimeoutError: If the places are not free within ``rl_safe.timeouts.start``.
        """
        self.guard()
        self._start_ray()
        # Ray has installed a SIGTERM handler of its own, which would end this process and leave the rest.
        self._interrupts.listen()
        self._interrupts.check()
        cluster = self._config.cluster
        bundles = placement(cluster)
        needed = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in ("CPU", "GPU")}
        for name, amount in needed.items():
            present = ray.cluster_resources().get(name, 0.0)
            if amount > present:
                raise ResourceError(
                    f"the run needs {amount:g} {name}s, the cluster has {present:g}: lower cluster.num_trainers, "
                    f"cluster.num_rollouts{LESS_OF[name]}"
                )
        self._group = placement_group(bundles, strategy="PACK")
        timeout_s = self._config.rl_safe.timeouts.start
        deadline = time.monotonic() + timeout_s
        wanted = " and ".join(f"{amount:g} {name}s" for name, amount in needed.items() if amount)
        while not self._group.wait(SLICE_S):
            self._interrupts.check()
            if time.monotonic() < deadline:
                continue
            raise PhaseTimeoutError(
                phase=Phase.START, group="the placement group", missing=(), waited_s=timeout_s,
                setting="rl_safe.timeouts.start", detail=f"{wanted} are not free",
            )  # fmt: skip
        # Not in the run's folder, where a run that does not hang is to leave nothing of it.
        self._hang_dir = Path(tempfile.mkdtemp(prefix="hang_" if self._temp_dir else TEMP_PREFIX, dir=self._temp_dir))
        self._tell(folders=[self._hang_dir])
        n = cluster.num_trainers
        self.trainers = [self._create(TrainerActor, rank, rank) for rank in range(n)]
        first = 0 if cluster.colocated else n
        self.rollouts = [self._create(RolloutActor, rank, first + rank) for rank in range(cluster.num_rollouts)]

    def _start_ray(self) -> None:
        try:
            self._start_local_ray() if self.is_local else self._join_ray()
        except (RayError, RuntimeError, ValueError, OSError) as error:
            address, reason = self._config.cluster.ray_address, (str(error).splitlines() or [type(error).__name__])[0]
            raise ClusterError(
                f"Ray could not be reached or started (cluster.ray_address={address}): {reason}"
            ) from error

    def _join_ray(self) -> None:
        ray.init(address=self._config.cluster.ray_address, log_to_driver=False, logging_level=logging.WARNING)

    def _start_local_ray(self) -> None:
        # Marks Ray's own processes as the run's too; sockets live under the folder, and their paths must stay short.
        env.mark_run(self._run_id)
        # Ray advises on its token authentication at every start; the token is wanted, the advice is not.
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
        # Ray replaces a loopback address by a reachable one, unless it believes that this platform has no clusters.
        env.keep_ray_on_loopback()
        ray_constants.ENABLE_RAY_CLUSTER = False
        remove_leftovers(Path(tempfile.gettempdir()))
        self._temp_dir = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX))
        self._tell(folders=[self._temp_dir])
        driver = psutil.Process()
        whose = f"{self._run_id} {driver.pid} {driver.create_time()} {process_namespace()}"
        (self._temp_dir / RUN_FILE).write_text(whose)
        ray.init(
            address="local",
            num_cpus=len(os.sched_getaffinity(0)),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _node_ip_address=LOOPBACK,
            _temp_dir=str(self._temp_dir),
            # Idle workers would compete with the actors' imports for the cores.
            _system_config={"prestart_worker_first_driver": False},
        )

    def _create(self, shell: type[ActorShell], rank: int, bundle: int) -> ActorRef:
        cluster = self._config.cluster
        is_trainer = shell is TrainerActor
        variables = env.actor_env(
            shell.role,
            self._run_id,
            self._config.rollout.kv_cache_gib,
            rank=rank,
            loopback=self.is_local,
            temp_dir=self._temp_dir,
            hang_dir=self._hang_dir,
        )
        handle: Any = (
            ray.remote(shell)
            .options(
                num_cpus=cluster.cpus_per_trainer if is_trainer else cluster.cpus_per_rollout,
                num_gpus=0 if cluster.device == "cpu" else GPU_SHARE if cluster.colocated else 1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
                runtime_env={"env_vars": variables},
            )
            .remote(self._config, rank)
        )
        return ActorRef(role=shell.role, rank=rank, handle=handle)

    def note_processes(self) -> None:
        """Remembers who belongs to the run, for `close`: to be called once all actors have started.

        One that is killed later leaves files behind, and nobody could tell any more whose they are.
        """
        self._pids |= {process.pid for process in run_processes(self._run_id)}
        self._tell(pids=self._pids)

    def close(self, *, kill_after_s: float) -> None:
        """Ends every process of the run: actors, their children, and Ray itself if it is ours.

        Training rank 0 goes last among the actors, because it owns the store. What has not ended ``kill_after_s``
        seconds after it was asked to is killed; processes are found by the mark in their environment. Every step is
        bounded in time, and goes ahead whatever became of the one before.
        """
        actors, group = list(reversed(self.actors)), self._group
        guardian, self._guardian = self._guardian, None
        self.trainers, self.rollouts, self._group = [], [], None
        attempt("killing actors", lambda: [ray.kill(a.handle, no_restart=True) for a in actors], timeout_s=kill_after_s)
        if group is not None and not self.is_local:  # a local Ray takes it along
            attempt("giving up placement", lambda: remove_placement_group(group), timeout_s=kill_after_s)
        attempt("shutting down Ray", ray.shutdown, timeout_s=kill_after_s)
        attempt(
            "ending processes", lambda: reap(self._run_id, kill_after_s=kill_after_s), timeout_s=3 * kill_after_s + 1
        )
        remove_ipc_files(ended(self._pids), since_s=self._made_at)
        for folder in (self._hang_dir, self._temp_dir):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        if guardian is not None:
            guardian.dismiss(timeout_s=kill_after_s)

    def keep_logs(self, target: Path) -> None:
        """Copies Ray's logs, which hold the actors' output, out of the folder that `close` removes."""
        if self._temp_dir is not None and (logs := self._temp_dir / "session_latest" / "logs").is_dir():
            shutil.copytree(logs, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("events", "export_events"))


def placement(cluster: ClusterConfig) -> list[dict[str, float]]:
    """What to reserve: a bundle for each trainer, then one for each rollout rank; colocated, one for each pair."""
    gpu = {} if cluster.device == "cpu" else {"GPU": 1.0}
    if cluster.colocated:
        return [{"CPU": cluster.cpus_per_trainer + cluster.cpus_per_rollout, **gpu}] * cluster.num_trainers
    trainers = [{"CPU": cluster.cpus_per_trainer, **gpu}] * cluster.num_trainers
    return trainers + [{"CPU": cluster.cpus_per_rollout, **gpu}] * cluster.num_rollouts
