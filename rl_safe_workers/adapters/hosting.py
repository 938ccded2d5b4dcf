"""What adapters share: a trainer process of a host framework, whose default group and calls are the host's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.adapters.totals import add_reports
from rl_safe_workers.comms.bootstrap import Bootstrap, BootstrapStep
from rl_safe_workers.comms.catalog import live_groups
from rl_safe_workers.comms.groups import set_group_timeouts
from rl_safe_workers.comms.late import LateWatch
from rl_safe_workers.comms.report import BootstrapReport, LedgerEntry
from rl_safe_workers.comms.supervision import Supervision
from rl_safe_workers.config import MegatronConfig, RlSafeConfig
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.shared_secret import SharedSecret
from rl_safe_workers.errors import CheckpointError, LifecycleError, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.platforms.device_memory import outside_torch
from rl_safe_workers.topology.comms_plan import CommsPlan
from rl_safe_workers.topology.groups import Classes, Features, OpClass
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.workers.teardown import TeardownMixin
from rl_safe_workers.worlds.training_world import TrainingWorld

HostGroups = Sequence[tuple[Any, str, Classes]]
"""A group of Megatron's, its key in ``nccl_communicator_config_path``, and what the host itself issues on it."""

_HEARD = timedelta(seconds=5)
"""How long a rank that has failed alone waits for the others to hear of it."""


class HostBootstrap(Bootstrap):
    """Connects what a host issues on Megatron's groups, as a bootstrap connects what Megatron does."""

    def run_host(
        self, wanted: HostGroups, *, timeout: timedelta
    ) -> tuple[tuple[LedgerEntry, ...], Mapping[str, frozenset[OpClass]]]:
        """Connects them. Collective over: the training world; after Megatron's own bootstrap.

        Args:
            wanted: In the same order on every rank.
            timeout: Longest time for all of it.

        Returns:
            What each op class has cost this rank, and the op classes by torch's name of the group.

        Raises:
            CommunicatorError: As `Bootstrap.run`.
            PhaseTimeoutError: As `Bootstrap.run`.
        """
        live = list(live_groups())
        steps = [
            BootstrapStep(group=group, classes=classes, max_ctas=self._limits.get(key))
            for mine, key, classes in wanted
            for group in live
            if group.group is mine and group.size > 1
        ]
        work = Supervision(self._control, "host_bootstrap", phase=Phase.BOOTSTRAP, timeout=timeout)
        work.compare("plan", {str(step.group): list(step.classes) for step in steps}, [s.group.ranks for s in steps])
        entries = tuple(entry for step in steps for entry in self._connect(step, work))
        work.finish()
        return entries, {step.group.group.group_name: frozenset(step.classes) for step in steps}


class HostedTrainer(TeardownMixin):
    """A host's trainer process: Megatron's groups are made with our limits, connected, and ended by agreement.

    Attributes:
        report: What all bootstraps have cost; None until one has run.
    """

    report: BootstrapReport | None = None
    _limits: Mapping[str, int] = {}
    """NCCL's channels at most, by Megatron's key of a group, that the groups were made with."""
    _without_groups: str
    """What to do where there are none, for an error."""

    @abstractmethod
    def host_groups(self) -> HostGroups:
        """What the host itself issues on Megatron's groups, once they exist."""

    @property
    @abstractmethod
    def outside_timeout(self) -> timedelta:
        """Longest wait of one collective outside of phases."""

    def take_world(self, rl_safe: RlSafeConfig) -> None:
        """Takes the host's default group, which holds trainers alone, as the training world.

        Collective over: the host's default group, through its store, for the secret that signs the control plane's
        messages; see `control.shared_secret`.

        Raises:
            PhaseTimeoutError: If a rank does not come within the timeout of phase ``world``; names it.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        self.setup_worker(
            training_rank=rank, training_size=size, rl_safe=rl_safe, megatron=MegatronConfig(), device=device_of_world()
        )
        with self.lifecycle.enter(Phase.WORLD):
            # A connection of its own: NCCL waits in the group's for peers, and would keep everyone else out.
            connection: Store = c10d._get_default_store().clone()  # type: ignore[attr-defined]
            self.store = PrefixStore("rl_safe", connection)
            self.world = TrainingWorld(training_rank=rank, size=size, joint_ranks=tuple(range(size)))
            deadline = Deadline.after(self.timeout(Phase.WORLD))
            shared = SharedSecret(self.store, rank=rank, size=size, phase=Phase.WORLD, deadline=deadline)
            self._open_control(shared.secret)
            self.control.barrier(Phase.WORLD, deadline)
            shared.withdraw()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """As `CommsMixin.phase`; outside of phases collectives time out after `outside_timeout`."""
        with super().phase(phase):
            try:
                yield
            finally:
                set_group_timeouts(self.outside_timeout)

    def models(self) -> Collection[Features]:
        """What decides about the collectives of every model that shares the groups."""
        return (self.features or Features.of(self.megatron),)

    def unlimited(self) -> Collection[str]:
        """Keys of groups that the host itself sends weights over: they have a limit only if the user has set one."""
        return ()

    def wanted_limits(self) -> dict[str, int]:
        """The limits that groups should be made with, which suit all models. The default group is the host's: none.

        Raises:
            ConfigError: As `GroupsMixin.plan_comms`.
        """
        settings = self.rl_safe.bootstrap
        layout, own = ParallelLayout.of(self.megatron, world_size=self.training_size), settings.max_ctas.limits()
        plans = [CommsPlan.of(layout, model, own, budget=settings.budget).limits for model in self.models()]
        free = {"world", *(set(self.unlimited()) - own.keys())}
        shared = set.intersection(*(set(plan) for plan in plans)) - free
        return {key: max(plan[key] for plan in plans) for key in sorted(shared)}

    def plan_comms(self) -> CommsPlan:
        """As `GroupsMixin.plan_comms`, with the limits that the groups were made with."""
        plan = super().plan_comms()
        return CommsPlan.of(plan.layout, plan.features, self._limits, budget=False)

    def bootstrap(self) -> BootstrapReport:
        """As `CommsMixin.bootstrap`; again for another model over the same groups. Adds to `report`, and returns it."""
        earlier, connected, late = self.report, self._connected, self.late_allocations()
        report = super().bootstrap()
        if earlier is not None:
            report = add_reports(earlier, report)
            self._connected = _united(connected, self._connected)
            self._late = LateWatch(self._connected, probe=outside_torch(self.device))
            self._late.found += late
        self.report = report
        return report

    def _connect_groups(
        self, probe: Callable[[], int] | None, *, phase: Phase = Phase.BOOTSTRAP, timeout: timedelta | None = None
    ) -> tuple[BootstrapReport, Mapping[str, frozenset[OpClass]]]:
        report, connected = super()._connect_groups(probe, phase=phase, timeout=timeout)
        plan = self.plan_comms()
        host = HostBootstrap(
            self.control, layout=plan.layout, features=plan.features, limits=plan.limits, device=self.device,
            probe=probe,
        )  # fmt: skip
        entries, of_host = host.run_host(self.host_groups(), timeout=timeout or self.remaining())
        report = replace(
            report, entries=report.entries + entries, skipped=report.skipped - len(of_host.keys() - connected.keys()),
            seconds=report.seconds + sum(entry.seconds for entry in entries),
        )  # fmt: skip
        return report, _united(connected, of_host)

    def require_bootstrap(self, what: str) -> None:
        """Holds something of the host's back until the bootstrap has run.

        Raises:
            LifecycleError: If it has not, and ``bootstrap.on_missing`` does not say to run it now.
        """
        if self.lifecycle.has_completed(Phase.BOOTSTRAP):
            return
        if self.rl_safe.bootstrap.on_missing == "bootstrap" and self.lifecycle.has_completed(Phase.GROUPS):
            self.bootstrap()
            return
        raise LifecycleError(
            f"{what} on training rank {self.training_rank}: the bootstrap has not run, so communicators would connect "
            f"later, when memory is full; {self._without_groups}"
        )

    def fail(self, phase: Phase, error: Exception) -> NoReturn:
        """Tells the others of a failure of this rank alone, which has an agreement with them ahead; raises it.

        Raises:
            CheckpointError: If the others have not heard of it in a few seconds.
        """
        self._deadline = self._deadline.at_most(_HEARD)
        try:
            self.tell_failure(error)
            self.together(phase, lambda: None, failure=error)
        except PhaseTimeoutError:
            raise CheckpointError(f"training rank {self.training_rank}: {type(error).__name__}: {error}") from error
        raise AssertionError("an agreement with a failure raises")

    def tell_failure(self, error: Exception) -> None:
        """Tells those who wait for this rank before the phase's next agreement. Adapters override it; may raise.

        Args:
            error: What this rank alone has failed with.
        """


def _united(
    first: Mapping[str, frozenset[OpClass]], second: Mapping[str, frozenset[OpClass]]
) -> dict[str, frozenset[OpClass]]:
    nothing: frozenset[OpClass] = frozenset()
    return {name: first.get(name, nothing) | second.get(name, nothing) for name in first.keys() | second.keys()}


def device_of_world() -> torch.device:
    """Where the default group's backend takes tensors."""
    if "nccl" in dist.get_backend_config() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def sizes_of_groups() -> MegatronConfig:
    """The sizes that Megatron's groups were made with."""
    return MegatronConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
    )
