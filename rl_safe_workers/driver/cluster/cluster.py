"""Owns the Ray side of a run: starts its actors, knows their nodes, and ends all its processes."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_safe_workers import env
from rl_safe_workers.compat.ray_tables import actor_id, actor_table, death_in_words, logs_folder
from rl_safe_workers.config import RunConfig
from rl_safe_workers.control.deadline import attempt
from rl_safe_workers.diagnostics.endings import ending_by_ray, joined, look_around
from rl_safe_workers.diagnostics.hang import collect_evidence
from rl_safe_workers.diagnostics.inquiry import Answers, RankProcess, ask_ranks, ending_here, processes_of_run
from rl_safe_workers.diagnostics.log_lines import ADVICE
from rl_safe_workers.diagnostics.rank_files import read_place
from rl_safe_workers.diagnostics.stopped import MachineWatch, Stop, read_stops
from rl_safe_workers.driver.cluster.actor_group import ActorRef, listed_actors
from rl_safe_workers.driver.cluster.actors import CALL_FRAME, RolloutActor, TrainerActor
from rl_safe_workers.driver.cluster.interrupts import Interrupts
from rl_safe_workers.driver.cluster.joining import join_ray, start_ray
from rl_safe_workers.driver.cluster.node_agent import NodePlace, end_rank_here
from rl_safe_workers.driver.cluster.node_agents import NodeAgents
from rl_safe_workers.driver.cluster.node_check import check_nodes
from rl_safe_workers.driver.cluster.nodes import Node, lost_among
from rl_safe_workers.driver.cluster.reservation import Reservation, reserve
from rl_safe_workers.driver.inputs.preflight import layout_of
from rl_safe_workers.errors import Died, PhaseTimeoutError, RankError, RunError, Stopped, in_one_line
from rl_safe_workers.lifecycle import unix_now
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.reaping.guardian import Guardian
from rl_safe_workers.reaping.ipc_files import Moment, remove_ipc_files, segments_of
from rl_safe_workers.reaping.processes import (
    RAY_FOLDER,
    ended,
    make_run_folder,
    reap,
    remove_leftovers,
    run_processes,
)
from rl_safe_workers.reaping.temp_folder import check_temp_folder, temp_folder
from rl_safe_workers.recipe import LOCAL_RAY, ray_address

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=BaseException)

LOOK_S = 30.0
"""Seconds that nodes get to answer, even if most of the start's timeout has passed."""
GPU_SHARE = 0.5
"""Share of a GPU that Ray counts for a trainer, and for the rollout rank on the same GPU. Ray does not enforce it."""


class Cluster:
    """The Ray side of a run. `close` may be called at any point, and more than once.

    Attributes:
        trainers: Trainer actors by training rank.
        rollouts: Rollout actors by rollout rank.
    """

    def __init__(
        self, config: RunConfig, *, run_id: str, interrupts: Interrupts, waits_for_nodes: bool = False
    ) -> None:
        """Stores its parts; `start` starts Ray.

        Args:
            config: Configuration of the run.
            run_id: Id with which the processes of the run are marked.
            interrupts: Checked in every wait.
            waits_for_nodes: True if `start` must also wait while the cluster has too few nodes, because a replacement
                for a lost node may arrive.

        Raises:
            ResourceError: If Ray is started for this run, and cannot start in the folder for temporary files.
        """
        self._config, self._run_id, self._interrupts = config, run_id, interrupts
        self._waits_for_nodes = waits_for_nodes
        self._reservation: Reservation | None = None
        self._agents: NodeAgents | None = None
        self._temp_dir: Path | None = None
        self._hang_dir: Path | None = None
        self._pids: set[int] = set()
        self._guardian: Guardian | None = None
        self.leaves_work = False
        """True once a thread of this process goes on with work of the run that was given up."""
        self._watch: MachineWatch | None = None
        self._places: dict[str, NodePlace] = {}
        self._made_at = Moment.now()
        if self.is_local:
            check_temp_folder(temp_folder())
        self.trainers: list[ActorRef] = []
        self.rollouts: list[ActorRef] = []

    @property
    def is_local(self) -> bool:
        """True if Ray is started for this run and ends with it."""
        return ray_address(self._config.cluster) == LOCAL_RAY

    @property
    def actors(self) -> list[ActorRef]:
        """The trainer actors, then the rollout actors."""
        return [*self.trainers, *self.rollouts]

    @property
    def nodes(self) -> list[Node]:
        """The nodes with actors of the run, in the order of ranks; empty before `start`."""
        return [] if self._reservation is None else self._reservation.used

    @property
    def _first_rollout_bundle(self) -> int:
        """The index of rollout rank 0's bundle. Colocated ranks share the trainers' bundles."""
        return 0 if self._config.cluster.colocated else self._config.cluster.num_trainers

    def guard(self) -> None:
        """Starts the guardian, which ends all processes of the run if this process is killed. Idempotent."""
        if self._guardian is None:
            kill_after_s = self._config.rl_safe.teardown.kill_after_s
            self._guardian = Guardian(self._run_id, since=self._made_at, kill_after_s=kill_after_s)

    def _tell(self, *, pids: Iterable[int] = (), folders: Iterable[Path] = ()) -> None:
        if self._guardian is not None:
            self._guardian.tell(pids=pids, folders=folders)

    def start(self, *, shared: Sequence[Path] = ()) -> None:
        """Starts or joins Ray, reserves the places of all actors at once, and creates the actors.

        Args:
            shared: Paths that must exist on all nodes. Checked only on a cluster that is joined.

        Raises:
            ResourceError: If the cluster is too small for the run.
            ClusterError: If there is no cluster to join, or Ray cannot be started.
            NodeMismatchError: If the versions or the code of nodes differ, or a node does not see a shared path.
            PhaseTimeoutError: If the cluster does not answer, or the places are not free, within
                ``rl_safe.timeouts.start``.
        """
        self.guard()
        deadline = time.monotonic() + self._config.rl_safe.timeouts.start
        self._start_ray()
        # Ray has installed its own SIGTERM handler, which would end this process and leave the others running.
        self._interrupts.listen()
        cluster, check = self._config.cluster, self._interrupts.check

        left_s = max(1.0, deadline - time.monotonic())
        self._reservation = reserve(
            cluster, layout_of(self._config), timeout_s=left_s, check=check, waits_for_nodes=self._waits_for_nodes
        )
        self._places = self._prepare_nodes(shared, lambda: max(LOOK_S, deadline - time.monotonic()))
        trainer, rollout = ray.remote(TrainerActor), ray.remote(RolloutActor)
        self.trainers = [self._create(trainer, Role.TRAINER, rank) for rank in range(cluster.num_trainers)]
        self.rollouts = [self._create(rollout, Role.ROLLOUT, rank) for rank in range(cluster.num_rollouts)]

    def _start_ray(self) -> None:
        if not self.is_local:
            join_ray(self._config.cluster, timeout_s=self._config.rl_safe.timeouts.start, check=self._interrupts.check)
            return
        # Ray's own processes carry the run's mark, too.
        env.mark_run(self._run_id)
        remove_leftovers(Path(tempfile.gettempdir()))
        self._temp_dir = make_run_folder(self._run_id)
        self._tell(folders=[self._temp_dir])
        start_ray(self._temp_dir)

    def _prepare_nodes(self, shared: Sequence[Path], left_s: Callable[[], float]) -> dict[str, NodePlace]:
        """Returns the folders and the interface for the actors of each node, by the node's id."""
        stop_limit_s = self._config.rl_safe.timeouts.stopped
        if self._temp_dir is not None:
            # In the temporary folder, because a run that does not hang must leave no hang files in its output folder.
            self._hang_dir = Path(tempfile.mkdtemp(prefix="hang_", dir=self._temp_dir))
            self._watch = MachineWatch(self._run_id, self._hang_dir, stop_limit_s)
            here = NodePlace(temp_dir=self._temp_dir, hang_dir=self._hang_dir, interface=env.LOOPBACK_INTERFACE)
            return {node.id: here for node in self.nodes}
        check = self._interrupts.check
        check_nodes(self.nodes, shared=shared, timeout_s=left_s(), check=check)
        kill_after_s = self._config.rl_safe.teardown.kill_after_s
        self._agents = NodeAgents(self.nodes, self._run_id, kill_after_s=kill_after_s, stop_limit_s=stop_limit_s)
        return self._agents.open(timeout_s=left_s(), check=check)

    def _create(self, shell: Any, role: Role, rank: int) -> ActorRef:
        cluster, places = self._config.cluster, self._places
        is_trainer = role is Role.TRAINER
        assert self._reservation is not None
        bundle = rank if is_trainer else self._first_rollout_bundle + rank
        node = self._reservation.nodes[bundle]
        variables = env.actor_env(
            role,
            self._run_id,
            self._config.rollout.kv_cache_gib,
            rank=rank,
            node=node.id,
            interface=places[node.id].interface,
            temp_dir=places[node.id].temp_dir,
            hang_dir=places[node.id].hang_dir,
            device=cluster.device,
        )
        handle: Any = shell.options(
            num_cpus=cluster.cpus_per_trainer if is_trainer else cluster.cpus_per_rollout,
            num_gpus=0 if cluster.device == "cpu" else GPU_SHARE if cluster.colocated else 1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._reservation.group, bundle),
            runtime_env={"env_vars": variables},
        ).remote(self._config, rank)
        return ActorRef(role=role, rank=rank, handle=handle, node=node)

    def end(self, actor: ActorRef) -> None:
        """Ends a rollout actor, its children and its files in shared memory. On return, all of them are gone.

        Raises:
            RunError: If a process of it does not end within ``rl_safe.teardown.kill_after_s``, or its node does not
                answer.
        """
        patience_s = self._config.rl_safe.teardown.kill_after_s
        self.rollouts = [one for one in self.rollouts if one.handle != actor.handle]
        # Not by Ray: it only asks the process to end, which a stopped process ignores, and it leaves the children.
        if self._agents is not None:
            assert actor.node is not None
            left = self._agents.end_rank(actor.node, actor.rank_id, timeout_s=2 * patience_s)
        else:
            left = end_rank_here(
                self._run_id, actor.rank_id, since=self._made_at, hang_dir=self._hang_dir, timeout_s=patience_s
            )
        if left:
            raise RunError(f"{actor.rank_id} is lost, and its processes do not end: {', '.join(left)}")
        # This stops Ray from starting a process for it later, and frees its place at once.
        attempt("killing an actor", lambda: ray.kill(actor.handle, no_restart=True), timeout_s=patience_s)

    def recreate(self, actor: ActorRef) -> None:
        """Creates a rollout actor with the rank, and in the place, of one that `end` has ended."""
        another = self._create(ray.remote(RolloutActor), Role.ROLLOUT, actor.rank)
        self.rollouts = sorted([*self.rollouts, another], key=lambda one: one.rank)

    def note_processes(self) -> None:
        """Records the run's processes for `close`. Call it when all actors have started.

        A process that is killed later may leave files. Without this record nobody could tell that they are the run's.
        """
        self._pids |= {process.pid for process in run_processes(self._run_id)}
        self._tell(pids=self._pids)
        if self._agents is not None:
            self._agents.note_processes()

    def lost_nodes(self) -> list[Node]:
        """Returns the nodes of the run that do not answer; always empty if Ray was started for this run."""
        return [] if self.is_local else lost_among(self.nodes)

    def on_nodes(self, nodes: Sequence[Node]) -> list[RankId]:
        """Returns the ranks whose places are on the given nodes."""
        ids = {node.id for node in nodes}
        bundles = () if self._reservation is None else self._reservation.nodes
        trainers, rollouts = bundles[: self._config.cluster.num_trainers], bundles[self._first_rollout_bundle :]
        places = {Role.TRAINER: trainers, Role.ROLLOUT: rollouts}
        return [RankId(role, rank) for role, of in places.items() for rank, node in enumerate(of) if node.id in ids]

    def ask_ranks(self, patience_s: float) -> Answers:
        """Asks the actors on all nodes for the line of code that they are at.

        Args:
            patience_s: Longest wait in seconds.
        """
        if self.is_local:
            return ask_ranks(
                lambda: processes_of_run(self._run_id),
                patience_s=patience_s,
                folder=self._hang_dir,
                call_frame=CALL_FRAME,
            )
        homes = {actor.rank_id: str(actor.node) for actor in self.actors}
        answers = Answers() if self._agents is None else self._agents.ask_ranks(timeout_s=patience_s)
        return replace(answers, homes=homes)

    def close(self, *, kill_after_s: float) -> None:
        """Ends every process of the run: actors, their children, and Ray itself if it was started for this run.

        Training rank 0 is the last actor to end, because it owns the store. A process that has not ended within
        ``kill_after_s`` seconds after the request is killed. Processes are found by the mark in their environment.
        Every step has a timeout, and runs even if the step before it failed.
        """
        actors, reservation, agents = list(reversed(self.actors)), self._reservation, self._agents
        nodes, segments = self.nodes, segments_of(self._pids)
        if self._watch is not None:
            self._watch.close()
        guardian, self._guardian = self._guardian, None
        self.trainers, self.rollouts, self._reservation, self._agents = [], [], None, None
        attempt("killing actors", lambda: [ray.kill(a.handle, no_restart=True) for a in actors], timeout_s=kill_after_s)
        if agents is not None:
            patience_s = 3 * kill_after_s + 1
            attempt(
                "ending what is left on the nodes",
                lambda: agents.close(timeout_s=patience_s, lost=lost_among(nodes)),
                timeout_s=patience_s + kill_after_s,
            )
        if reservation is not None and not self.is_local:  # a local Ray ends together with its placement group
            group = reservation.group
            attempt("giving up placement", lambda: remove_placement_group(group), timeout_s=kill_after_s)
        attempt("shutting down Ray", ray.shutdown, timeout_s=kill_after_s)
        attempt(
            "ending processes", lambda: reap(self._run_id, kill_after_s=kill_after_s), timeout_s=3 * kill_after_s + 1
        )
        remove_ipc_files(ended(self._pids), since=self._made_at, segments=segments)
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
        if guardian is not None and self.leaves_work:
            guardian.stay()
        elif guardian is not None:
            guardian.dismiss(timeout_s=kill_after_s)

    def keep_evidence(self, failure: E, folder: Path, *, patience_s: float) -> E | PhaseTimeoutError | RankError:
        """Saves the evidence of a failure before `close`: where ranks hang, and Ray's logs.

        It prints where ranks hang, and why a rank has died.

        Args:
            failure: The error of the run.
            folder: Receives ``hang/`` and ``ray_logs/``. On a cluster that was joined, ``ray_logs/`` holds the end of
                the output of the run's own processes, by node.
            patience_s: Longest wait for each of the two, in seconds.

        Returns:
            The failure, or a better one if the evidence gives it: a copy that names fewer ranks, because the others
            only wait for these; a copy that says where a dead rank was last seen; or the stop that the rank was ended
            for.
        """
        hang = collect_evidence(
            failure, ask=self.ask_ranks, folder=folder, patience_s=patience_s, facts={"ray": listed_actors}
        )
        if hang is not None:
            sys.stderr.write(f"{hang.verdict}\n")
        stop = self._stop_behind(failure, patience_s)
        if stop is None:
            attempt("asking why a rank has died", lambda: self._tell_ending(failure), timeout_s=patience_s)
        logs = folder / "ray_logs"
        attempt("keeping Ray's logs", lambda: self._keep_logs(logs, 0.8 * patience_s), timeout_s=patience_s)
        if hang is not None and hang.culprits is not None and isinstance(failure, PhaseTimeoutError):
            return failure.with_missing(hang.culprits)
        return self._seen(failure) if stop is None else stop

    def why_lost(self, failure: RunError, rank_id: RankId) -> str:
        """Returns one line about the loss of a rank: the stop that it was ended for, or the failure and last place."""
        stop = self._stop_behind(failure, self._config.rl_safe.teardown.kill_after_s)
        why = in_one_line(stop or self._seen(failure))
        if self._hang_dir is None or isinstance(failure, RankError):
            return why
        place = read_place(self._hang_dir, rank_id)
        return why if place is None else f"{why}; {rank_id} was last seen at {place}"

    def _seen(self, failure: E) -> E | RankError:
        if self._hang_dir is not None and isinstance(failure, RankError) and isinstance(failure.cause, Died):
            place = read_place(self._hang_dir, failure.rank_id)  # None if it died on another machine
            return failure if place is None else failure.seen_at(place)
        return failure

    def _stop_behind(self, failure: BaseException, patience_s: float) -> RankError | None:
        """Returns the stop behind a failure, if the rank or one of its processes was ended for a stop; else None."""
        if not isinstance(failure, RankError):
            return None
        stops: list[Stop] = []
        agents = self._agents
        if agents is not None:
            attempt(
                "asking who was stopped",
                lambda: stops.extend(agents.stops(timeout_s=0.8 * patience_s)),
                timeout_s=patience_s,
            )
        elif self._hang_dir is not None:
            stops = read_stops(self._hang_dir)
        for stop in stops:
            if stop.rank_of({}) == failure.rank_id and stop.may_explain(unix_now()):
                return RankError(
                    rank_id=failure.rank_id,
                    phase=failure.phase,
                    cause=Stopped(),
                    text=f"{stop.process.who} is stopped (SIGSTOP): it was ended after rl_safe.timeouts.stopped",
                    trace=failure.trace,
                    raised_at=stop.at_s,
                    place=stop.place,
                )
        return None

    def _tell_ending(self, failure: BaseException) -> None:
        """Prints why a rank has died, as far as Ray and this machine know, and what to do."""
        if not isinstance(failure, RankError) or not isinstance(failure.cause, Died):
            return
        rank_id = failure.rank_id
        ids = {actor_id(actor.handle) for actor in self.actors if actor.rank_id == rank_id}
        for row in actor_table():
            if row["ActorID"] not in ids or not row["Pid"]:
                continue
            process = RankProcess(rank_id=rank_id, pid=row["Pid"], folder=self._hang_dir)
            here = ending_here(process, look_around(logs_folder())) if self.is_local else None
            if (ending := joined(ending_by_ray(death_in_words(row)), here)) is not None:
                sys.stderr.write(f"{rank_id}: {ending}: {ADVICE[ending.fault]}\n")

    def _keep_logs(self, target: Path, timeout_s: float) -> None:
        """Copies Ray's logs, which hold the actors' output, before `close` removes them."""
        if self._agents is not None:
            self._agents.keep_logs(target, timeout_s=timeout_s, lost=lost_among(self.nodes))
        elif self._temp_dir is not None and (logs := self._temp_dir / RAY_FOLDER / "session_latest" / "logs").is_dir():
            shutil.copytree(logs, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("events", "export_events"))
