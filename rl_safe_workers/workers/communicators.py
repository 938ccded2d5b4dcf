"""Creates a trainer's Megatron groups with limits, connects them early, and watches for later allocations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rl_safe_workers.comms.bootstrap import Bootstrap, HostGroups
from rl_safe_workers.comms.late import LateWatch
from rl_safe_workers.comms.live_groups import LiveGroup
from rl_safe_workers.comms.megatron_groups import init_megatron_groups, limit_of, world_options
from rl_safe_workers.comms.report import BootstrapReport, LateAllocation, add_reports
from rl_safe_workers.config import MegatronConfig
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.failure import Failure
from rl_safe_workers.errors import CommunicatorError, LifecycleError
from rl_safe_workers.lifecycle import REQUIRES, Phase
from rl_safe_workers.platforms import cuda
from rl_safe_workers.platforms.device_memory import free_bytes, outside_torch
from rl_safe_workers.ranks import Role, trainer_id
from rl_safe_workers.setting_names import bootstrap_setting
from rl_safe_workers.topology.comms_plan import CommsPlan
from rl_safe_workers.topology.groups import Features, OpClass
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.worlds.training_rank import Part, TrainingRank

_WATCHED = (Phase.LOGPROB, Phase.TRAIN)


class HostComms:
    """The collectives that a host framework adds to Megatron's own. An adapter overrides what applies to its host."""

    missing_groups = "call bootstrap() after init_groups()"
    """Advice for errors if the bootstrap has not run."""
    makes_groups = False
    """True if the host itself makes Megatron's groups, with the limits of `Communicators.limits` or without limits."""

    def groups(self) -> HostGroups:
        """Returns the op classes that the host itself issues on Megatron's groups. Call it once the groups exist."""
        return ()

    def models(self, own: Features) -> Collection[Features]:
        """Returns the features of every model that shares the groups, including ``own``."""
        return (own,)

    def unlimited(self, megatron: MegatronConfig) -> Collection[str]:
        """Returns keys of groups over which the host sends weights. They get a limit only if the user has set one."""
        return ()


class Communicators(Part):
    """Makes and connects the communicators of one rank.

    Attributes:
        limits: Largest number of NCCL channels (CTAs) of each of a host's groups, by Megatron's group key.
        report: The cost of all bootstraps of these groups; None until one has run.
    """

    def __init__(self, rank: TrainingRank, host: HostComms) -> None:
        super().__init__(rank)
        self._host = host
        self.limits: Mapping[str, int] = {}
        self.report: BootstrapReport | None = None
        self._late: LateWatch | None = None
        self._connected: Mapping[str, frozenset[OpClass]] = {}
        """Op classes by torch's name of the group."""
        self._watched = Counter[str]()

    @property
    def has_nccl(self) -> bool:
        """True if the groups use NCCL."""
        return self.rank.device.type == "cuda"

    def plan(self) -> CommsPlan:
        """Returns the plan of the communicators, from the configuration alone. Not collective.

        Raises:
            ConfigError: If ``rl_safe.bootstrap.max_ctas`` names an unknown group, or a value is not a number of CTAs.
        """
        layout, features, settings = self._layout(), self._features(), self.rank.rl_safe.bootstrap
        own = settings.max_ctas.limits()
        if self._host.makes_groups:
            CommsPlan.of(layout, features, own, budget=settings.budget)  # raises for invalid settings
            return CommsPlan.of(layout, features, self.limits, budget=False)
        return CommsPlan.of(layout, features, own, budget=settings.budget)

    def _layout(self) -> ParallelLayout:
        return ParallelLayout.of(self.rank.megatron, world_size=self.rank.training_size)

    def _features(self) -> Features:
        return self.rank.features or Features.of(self.rank.megatron)

    def wanted_limits(self) -> dict[str, int]:
        """Returns channel limits in CTAs that fit all models that share a host's groups, by Megatron's group key.

        A group has a limit only if the plan of every model limits it. The largest of these limits then counts. If the
        default group exists, its limit is the one that it was made with.

        Raises:
            ConfigError: As `plan`.
        """
        settings = self.rank.rl_safe.bootstrap
        layout, own = self._layout(), settings.max_ctas.limits()
        models = self._host.models(self._features())
        plans = [CommsPlan.of(layout, model, own, budget=settings.budget).limits for model in models]
        free = {"world", *(set(self._host.unlimited(self.rank.megatron)) - own.keys())}
        shared = set.intersection(*(set(plan) for plan in plans)) - free
        found = {key: max(plan[key] for plan in plans) for key in sorted(shared)}
        made = limit_of(dist.group.WORLD) if dist.is_initialized() else None
        return found if made is None else {"world": made, **found}

    def world_options(self) -> Any:
        """Returns the backend's options for a default group that we make; None for the backend's defaults."""
        return world_options(self.plan().limits) if self.has_nccl else None

    def init_groups(self, *, seed: int) -> None:
        """Creates Megatron's groups and seeds its RNG tracker. Collective over: the training world.

        Raises:
            ConfigError: As `plan`, before any group is made.
            CommunicatorError: Before any group is made, if the backend is unknown or lacks an op class that a group
                will carry. Also on every rank, if one has too little free device memory for the groups; names that
                rank.
            PhaseTimeoutError: If a rank does not come within ``rl_safe.timeouts.groups``; names it.
        """
        plan = self.plan()
        plan.check_backend(dist.get_backend_config())
        with self.rank.phase(Phase.GROUPS):
            self.check_memory()
            init_megatron_groups(
                self.rank.megatron,
                seed=seed,
                timeout=self.rank.timeout(Phase.GROUPS),
                limits=plan.limits if self.has_nccl else None,
            )
            # A rebuilt set of groups needs its own bootstrap.
            self.rank.lifecycle.invalidate(Phase.BOOTSTRAP)

    def check_memory(self) -> None:
        """Refuses the groups on every rank if one rank has no room for them. Collective over: the training world.

        Raises:
            CommunicatorError: On every rank, naming the first rank that has no room.
        """
        if not self.has_nccl:
            return
        mine = None
        try:
            self.plan().check_fits(free_bytes=free_bytes(self.rank.device), gpus_per_node=cuda.gpus_of_this_node())
        except CommunicatorError as error:
            mine = Failure.of(error)
        for rank, failure in self.rank.failed_ranks(Phase.GROUPS, mine).items():
            text = f"training rank {rank}: {failure.text}"
            raise CommunicatorError(text, culprit=trainer_id(rank), foreign=failure.foreign)

    def bootstrap(self) -> BootstrapReport:
        """Connects every communicator for every op class it will carry. Collective over: the training world.

        Idempotent. Call it again after groups were rebuilt, or for another model over the groups of a host.

        Returns:
            The cost of each op class of each group on this rank. For a host's groups, the total of all bootstraps.

        Raises:
            CommunicatorError: On every rank, if plans differ or a rank fails; names it.
            PhaseTimeoutError: On every rank, if one does not come to a group within ``rl_safe.timeouts.bootstrap``.
        """
        with self.rank.phase(Phase.BOOTSTRAP):
            probe = outside_torch(self.rank.device)
            late = self.late_allocations()
            report, connected = self.connect_all(probe)
            if self._host.makes_groups and self.report is not None:
                report, connected = add_reports(self.report, report), _united(self._connected, connected)
            else:
                late = []
            self.report, self._connected, self._watched = report, connected, Counter()
            self._late = LateWatch(connected, probe=probe)
            self._late.found += late
            return report

    def connect_all(
        self, probe: Callable[[], int] | None, *, phase: Phase = Phase.BOOTSTRAP, timeout: timedelta | None = None
    ) -> tuple[BootstrapReport, Mapping[str, frozenset[OpClass]]]:
        """Connects every group, initially or after a release. Collective over: the training world.

        Args:
            probe: Returns the device memory outside torch's allocator.
            phase: The phase that this is part of, for errors.
            timeout: Longest time for all groups; None for the rest of the phase.

        Returns:
            The report, and the op classes by torch's name of the group.

        Raises:
            CommunicatorError: As `bootstrap`.
            PhaseTimeoutError: As `bootstrap`.
        """
        plan = self.plan()
        work = Bootstrap(
            self.rank.control,
            layout=plan.layout,
            features=plan.features,
            limits=plan.limits if probe is not None else {},
            device=self.rank.device,
            probe=probe,
        )
        deadline = Deadline.after(timeout or self.rank.remaining())
        report = work.run(timeout=deadline.remaining(), elsewhere=self.rank.world.host_groups, phase=phase)
        wanted = self._host.groups()
        if not wanted:
            return report, work.connected
        entries, of_host = work.run_host(wanted, timeout=deadline.remaining(), phase=phase)
        report = replace(
            report,
            entries=report.entries + entries,
            skipped=report.skipped - len(of_host.keys() - work.connected),
            seconds=report.seconds + sum(entry.seconds for entry in entries),
        )
        return report, _united(work.connected, of_host)

    def is_connected(self, group: LiveGroup) -> bool:
        """Returns True if the bootstrap has connected a group."""
        return group.group.group_name in self._connected

    def late_allocations(self) -> list[LateAllocation]:
        """Returns the collectives that the bootstrap missed, found in the first training steps. Not collective."""
        return [] if self._late is None else list(self._late.found)

    def require(self, what: str) -> None:
        """Checks that the bootstrap has run. With ``bootstrap.on_missing=bootstrap`` it runs the bootstrap now.

        Args:
            what: Name of the caller's work, for the error, e.g. ``"offload"``.

        Raises:
            LifecycleError: If the bootstrap has not run and is not run now.
        """
        lifecycle = self.rank.lifecycle
        if lifecycle.has_completed(Phase.BOOTSTRAP):
            return
        if self.rank.rl_safe.bootstrap.on_missing == "bootstrap" and (
            lifecycle.has_completed(Phase.GROUPS) or not self._host.makes_groups
        ):
            self.bootstrap()
            return
        raise LifecycleError(
            f"{what} on training rank {self.rank.training_rank}: the bootstrap has not run, so communicators would "
            f"connect later, when memory is full; {self._host.missing_groups}, "
            f"or set {bootstrap_setting('on_missing=bootstrap')}"
        )

    def before(self, phase: Phase) -> None:
        """Refuses a phase that needs connected communicators if the bootstrap has not run; see `require`.

        Raises:
            LifecycleError: As `require`.
        """
        if Phase.BOOTSTRAP in REQUIRES[Role.TRAINER].get(phase, ()):
            self.require(f"phase {phase}")

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Watches the first training steps for collectives that take memory after the bootstrap.

        Raises:
            CommunicatorError: If a collective does, and ``rl_safe.bootstrap.on_late`` is ``raise``.
        """
        settings = self.rank.rl_safe.bootstrap
        if phase not in _WATCHED:
            yield
            return
        with self.watching(phase, steps=settings.watch_steps, refuse=settings.on_late == "raise"):
            yield

    @contextmanager
    def watching(self, name: str, *, steps: int, refuse: bool) -> Iterator[None]:
        """Watches the body for collectives that take memory after the bootstrap. Not collective.

        Args:
            name: A name of the body, for errors.
            steps: Number of bodies with this name to watch.
            refuse: True to raise an error for findings; False to log a warning.

        Raises:
            CommunicatorError: If ``refuse``, and the bootstrap has missed something.
        """
        watch = self._late
        if watch is None or self._watched[name] >= steps:
            yield
            return
        self._watched[name] += 1
        with watch.watching(name) as found:
            yield
        watch.report(found, who=f"training rank {self.rank.training_rank}", refuse=refuse)


def _united(
    first: Mapping[str, frozenset[OpClass]], second: Mapping[str, frozenset[OpClass]]
) -> dict[str, frozenset[OpClass]]:
    nothing: frozenset[OpClass] = frozenset()
    return {name: first.get(name, nothing) | second.get(name, nothing) for name in first.keys() | second.keys()}
