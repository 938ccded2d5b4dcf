"""Calls a run's actors phase by phase under deadlines, and records the events, from the driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

from rl_safe_workers.comms.report import BootstrapReport, LateAllocation
from rl_safe_workers.config import RunConfig
from rl_safe_workers.control.deadline import Background, Deadline, DeadlineExceededError
from rl_safe_workers.diagnostics.thread_waits import where_is
from rl_safe_workers.diagnostics.vitals import Vitals
from rl_safe_workers.driver.cluster.actor_group import ActorRef, PendingCalls, died, gather, is_dead, start_calls
from rl_safe_workers.driver.cluster.actors import NODE_IP
from rl_safe_workers.driver.cluster.cluster import Cluster
from rl_safe_workers.driver.cluster.interrupts import SLICE_S, Interrupts
from rl_safe_workers.driver.cluster.joining import LOOPBACK
from rl_safe_workers.driver.cluster.node_check import marker
from rl_safe_workers.driver.outputs.console import RunConsole
from rl_safe_workers.driver.outputs.metrics import PhaseTotal
from rl_safe_workers.errors import (
    THE_DRIVER,
    ClusterError,
    Died,
    Interrupted,
    NodeLostError,
    PhaseTimeoutError,
    RankError,
    RunError,
)
from rl_safe_workers.lifecycle import SAVE_ENDS_BEFORE, Phase, PhaseEvent, unix_now
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.setting_names import timeout_setting
from rl_safe_workers.worlds.address import StoreAddress

LEAVING_S = 3.0
"""Seconds to wait for a node to disappear after a process died. A node that shuts down ends its processes first."""
T = TypeVar("T")
Arguments = Callable[[int], tuple[Any, ...]]
Rescue = Callable[[RunError, PendingCalls], PendingCalls | None]


def _no_arguments(rank: int) -> tuple[Any, ...]:
    return ()


def _cannot_rescue(error: RunError, calls: PendingCalls) -> PendingCalls | None:
    return None


class Session:
    """Sets up trainers and rollout ranks phase by phase, calls them, and tears them down.

    Attributes:
        events: Phase events of all ranks so far.
        totals: Count and seconds of each phase, measured in the driver, in the order of the first entry.
        ledgers: The bootstrap's report of each trainer, by training rank.
        address: Address of the run's store, once there is a training world.
        specs: The weights of every weight sync, once the trainers have the model.
        rescue: Called with a failure and the calls that were waited for. If the run can go on, it returns the calls
            that are left to wait for; else None.
    """

    address: StoreAddress

    def __init__(self, config: RunConfig, cluster: Cluster, console: RunConsole, interrupts: Interrupts) -> None:
        """Stores its parts. Starts nothing."""
        self._config, self._cluster, self._console, self._interrupts = config, cluster, console, interrupts
        self.specs: Sequence[WeightSpec] = ()
        self.rescue: Rescue = _cannot_rescue
        self._vitals: Vitals[ActorRef] = Vitals(is_dead)
        self.ledgers: list[BootstrapReport] = []
        self.events: list[PhaseEvent] = []
        self.totals: dict[str, PhaseTotal] = {}

    def timeout_s(self, phase: Phase) -> float:
        """Returns the timeout of a phase in seconds. Adds the save's timeout if the phase may have to finish a save."""
        timeouts, checkpoint = self._config.rl_safe.timeouts, self._config.rl_safe.checkpoint
        may_finish_a_save = checkpoint.async_save and phase in SAVE_ENDS_BEFORE
        return float(getattr(timeouts, phase.value)) + (timeouts.save if may_finish_a_save else 0.0)

    def start_trainers(self, phase: Phase, method: str, arguments: Arguments = _no_arguments) -> PendingCalls:
        """Starts a method on all trainers at once."""
        return start_calls(self._cluster.trainers, phase, method, arguments)

    def start_rollouts(self, phase: Phase, method: str, arguments: Arguments = _no_arguments) -> PendingCalls:
        """Starts a method on all rollout ranks at once."""
        return start_calls(self._cluster.rollouts, phase, method, arguments)

    def finish(self, calls: PendingCalls, *, hears_all: bool = False) -> list[Any]:
        """Waits for calls within the timeout of their phase. Returns their values in the order they were started.

        Args:
            calls: The calls. `rescue` may give some of them up; these have no value.
            hears_all: See `actor_group.gather`.
        """
        return self.finish_left(calls, hears_all=hears_all)[1]

    def finish_left(self, calls: PendingCalls, *, hears_all: bool = False) -> tuple[PendingCalls, list[Any]]:
        """Does the same as `finish`, and also returns the calls that `rescue` has not given up."""
        try:
            return self._gather(calls, hears_all)
        finally:
            self._record(calls.phase, time.monotonic() - calls.started_s)

    def is_overdue(self, calls: PendingCalls) -> bool:
        """Returns True if calls have taken longer than the timeout of their phase."""
        return time.monotonic() > calls.started_s + self.timeout_s(calls.phase)

    def first_to_finish(self, waits: Mapping[int, PendingCalls]) -> int:
        """Waits until `finish` has something to take or to raise for one of several waits; returns its key.

        Args:
            waits: At least one.

        Raises:
            Interrupted: On a signal.
        """
        while True:
            for key, calls in waits.items():
                if calls.is_answered or self.is_overdue(calls):
                    return key
            self._interrupts.check()
            if (dead := self._vitals.first_dead(self._cluster.actors)) is not None:
                return next((key for key, calls in waits.items() if dead in calls.refs.values()), next(iter(waits)))
            time.sleep(SLICE_S)

    def _gather(self, calls: PendingCalls, hears_all: bool = False) -> tuple[PendingCalls, list[Any]]:
        while True:
            try:
                return calls, self._gather_once(calls, hears_all)
            except (Interrupted, ClusterError):
                raise
            except RunError as error:
                self._blame_lost_nodes(error, calls.phase)
                left = self.rescue(error, calls)
                if left is None:
                    raise
                calls = left

    def _gather_once(self, calls: PendingCalls, hears_all: bool) -> list[Any]:
        busy = {actor.handle for actor in calls.refs.values()}
        idle = [actor for actor in self._cluster.actors if actor.handle not in busy]

        def check() -> None:
            self._interrupts.check()
            if (dead := self._vitals.first_dead(idle)) is not None:
                raise died(dead, calls.phase)

        return gather(
            calls,
            timeout_s=self.timeout_s(calls.phase),
            on_events=self.events.extend,
            check=check,
            hears_all=hears_all,
        )

    def _blame_lost_nodes(self, error: RunError, phase: Phase) -> None:
        """Raises NodeLostError, caused by ``error``, if nodes of the run are gone: their loss is the root cause."""
        if self._cluster.is_local:
            return
        deadline = time.monotonic() + (
            LEAVING_S if isinstance(error, RankError) and isinstance(error.cause, Died) else 0.0
        )
        while not (lost := self._cluster.lost_nodes()):
            if time.monotonic() >= deadline:
                return
            time.sleep(SLICE_S)
        names, ranks = [str(node) for node in lost], self._cluster.on_nodes(lost)
        raise NodeLostError(nodes=names, phase=phase, ranks=ranks, detail=str(error)) from error

    def run_here(self, phase: Phase, work: Callable[[], T]) -> T:
        """Runs work of a phase in this process, as `within` does, and records its seconds."""
        started_s = time.monotonic()
        try:
            return self.within(phase, work)
        finally:
            self._record(phase, time.monotonic() - started_s)

    def within(self, phase: Phase, work: Callable[[], T]) -> T:
        """Runs work in this process within the timeout of a phase, and reacts to signals meanwhile.

        The work runs on a separate thread. A thread that does not end in time is abandoned; it ends with the process.

        Raises:
            PhaseTimeoutError: If the work does not end in time. The error names the driver, and the line of code that
                the work is at.
            Interrupted: On a signal.
        """
        deadline = Deadline.after(self.timeout_s(phase))
        begun = Background(work, name=phase)
        try:
            return begun.wait(deadline, on_tick=self._interrupts.check, tick_s=SLICE_S)
        except DeadlineExceededError:
            raise PhaseTimeoutError(
                phase=phase,
                awaited=THE_DRIVER,
                waited_s=deadline.waited_s,
                setting=timeout_setting(phase),
                detail=where_is(begun.thread),
            ) from None
        finally:
            if not begun.is_done:
                self._cluster.leaves_work = True

    def _record(self, phase: Phase, seconds: float) -> None:
        self.totals[phase] = self.totals.get(phase, PhaseTotal()).plus(seconds)

    def _shown(self, calls: Callable[[], PendingCalls], phase: Phase) -> list[Any]:
        with self._console.phase(phase, self.timeout_s(phase)):
            return self.finish(calls())

    def set_up(self) -> None:
        """Runs the phases start, world, groups, bootstrap and convert: the trainers then have the model."""
        self.connect()
        self.specs = self._shown(lambda: self.start_trainers(Phase.CONVERT, "convert"), Phase.CONVERT)[0]

    def connect(self) -> None:
        """Runs the phases start, world, groups and bootstrap: the trainers have no model yet."""
        started_s = time.monotonic()
        with self._console.phase(Phase.START, self.timeout_s(Phase.START)):
            try:
                self._start_cluster()
                launched_s = unix_now()
                calls = self.start_trainers(Phase.START, "start", lambda rank: (launched_s,))
                addresses, ranks = self._serve_engines(), self._config.rollout.tensor_model_parallel_size
                engines = self.start_rollouts(
                    Phase.START, "start", lambda rank: (launched_s, addresses[rank // ranks * ranks])
                )
                self._gather(calls.joined_with(engines))
                self._cluster.note_processes()
            finally:
                self._record(Phase.START, time.monotonic() - started_s)
        with self._console.phase(Phase.WORLD, self.timeout_s(Phase.WORLD)):
            self.address = self._serve_store()
            self.finish(self.start_trainers(Phase.WORLD, "enter_world", lambda rank: (self.address,)))
        self._shown(lambda: self.start_trainers(Phase.GROUPS, "groups"), Phase.GROUPS)
        self.ledgers = self._shown(lambda: self.start_trainers(Phase.BOOTSTRAP, "bootstrap"), Phase.BOOTSTRAP)

    def _start_cluster(self) -> None:
        if self._cluster.is_local:
            self._cluster.start()
            return
        try:
            self._join_cluster()
        except Interrupted:
            raise
        except RunError as error:
            self._blame_lost_nodes(error, Phase.START)
            raise

    def _join_cluster(self) -> None:
        trainer, model = self._config.trainer, self._config.model.path

        def shared_paths() -> list[Path]:
            # The model exists, except in a job that only runs the bootstrap.
            paths = [Path(model).absolute()] if model and Path(model).exists() else []
            if trainer.save_freq > 0 and trainer.default_local_dir is not None:
                paths.append(stack.enter_context(marker(Path(trainer.default_local_dir))))
            return paths

        with ExitStack() as stack:
            self._cluster.start(shared=self.within(Phase.START, shared_paths))

    def convert(self, method: str, *arguments: Any) -> Any:
        """Runs a conversion on every trainer. Returns the result of training rank 0.

        Args:
            method: Name of the trainers' method.
            *arguments: Its arguments, the same for all trainers.
        """
        return self._shown(lambda: self.start_trainers(Phase.CONVERT, method, lambda rank: arguments), Phase.CONVERT)[0]

    def _serve_store(self) -> StoreAddress:
        (address,) = self._serve_stores(self._cluster.trainers[:1], Phase.WORLD)
        return cast(StoreAddress, address)

    def _serve_engines(self) -> list[StoreAddress | None]:
        """Returns the address of each engine's store, by its first rollout rank; None for all other ranks."""
        if self._config.rollout.tensor_model_parallel_size == 1:
            return [None] * len(self._cluster.rollouts)
        return self._serve_stores(self._cluster.rollouts, Phase.START)

    def _serve_stores(self, owners: Sequence[ActorRef], phase: Phase) -> list[StoreAddress | None]:
        hosts = [LOOPBACK] * len(owners)
        if not self._cluster.is_local:
            _, hosts = self._gather(start_calls(owners, phase, NODE_IP, _no_arguments))
        return self._gather(start_calls(owners, phase, "serve_store", lambda rank: (hosts[rank],)))[1]

    def late_allocations(self) -> list[list[LateAllocation]]:
        """Returns the late allocations found in the first training steps, a list for each training rank."""
        return self._gather(self.start_trainers(Phase.TRAIN, "late_allocations"))[1]

    def load(self, path: str, layout: dict[str, int]) -> None:
        """Loads a checkpoint into the trainers."""
        self._shown(lambda: self.start_trainers(Phase.LOAD, "load", lambda rank: (path, layout)), Phase.LOAD)

    def save(self, step: int, layout: dict[str, int], driver_state: dict[str, Any]) -> str:
        """Saves a checkpoint on the training world alone; returns its path."""
        arguments = (step, layout, driver_state)
        return str(self._shown(lambda: self.start_trainers(Phase.SAVE, "save", lambda rank: arguments), Phase.SAVE)[0])

    def teardown(self) -> dict[int, str]:
        """Tears down the worlds after a success.

        Returns:
            The failures that trainers reported, by training rank; normally empty.
        """

        def calls() -> PendingCalls:
            # All ranks leave the joint group at the same time; each trainer then also leaves its training groups.
            first = self.start_trainers(Phase.TEARDOWN, "teardown")
            return first.joined_with(self.start_rollouts(Phase.TEARDOWN, "teardown"))

        verdicts = self._shown(calls, Phase.TEARDOWN)[: len(self._cluster.trainers)]
        return {rank: text for verdict in verdicts for rank, text in (verdict or {}).items()}
