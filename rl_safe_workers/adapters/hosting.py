"""What adapters share: a trainer process of a host framework, whose default group and calls are the host's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.comms.bootstrap import Bootstrap, BootstrapStep
from rl_safe_workers.comms.catalog import live_groups
from rl_safe_workers.comms.report import BootstrapReport, LedgerEntry
from rl_safe_workers.comms.supervision import Supervision
from rl_safe_workers.config import MegatronConfig
from rl_safe_workers.errors import LifecycleError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.topology.comms_plan import CommsPlan
from rl_safe_workers.topology.groups import Classes, OpClass
from rl_safe_workers.workers.teardown import TeardownMixin

HostGroups = Sequence[tuple[Any, str, Classes]]
"""A group of Megatron's, its key in ``nccl_communicator_config_path``, and what the host itself issues on it."""


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
        call = self._store.add(f"host_bootstrap/calls/{self._rank}", 1)
        live = list(live_groups())
        steps = [
            BootstrapStep(group=group, classes=classes, max_ctas=self._limits.get(key))
            for mine, key, classes in wanted
            for group in live
            if group.group is mine and group.size > 1
        ]
        work = Supervision(
            self._store, "host_bootstrap", call, phase=Phase.BOOTSTRAP, training_rank=self._rank,
            size=self._layout.world_size, timeout=timeout,
        )  # fmt: skip
        work.compare("plan", {str(step.group): list(step.classes) for step in steps}, [s.group.ranks for s in steps])
        entries = tuple(entry for step in steps for entry in self._connect(step, work))
        work.finish()
        return entries, {step.group.group.group_name: frozenset(step.classes) for step in steps}


class HostedTrainer(TeardownMixin):
    """A host's trainer process: Megatron's groups are made with our limits, connected, and ended by agreement.

    Attributes:
        report: What the bootstrap has cost; None until it has run.
    """

    report: BootstrapReport | None = None
    _limits: Mapping[str, int] = {}
    """NCCL's channels at most, by Megatron's key of a group, that the groups were made with."""
    _without_groups: str
    """What to do where there are none, for an error."""

    @abstractmethod
    def host_groups(self) -> HostGroups:
        """What the host itself issues on Megatron's groups, once they exist."""

    def wanted_limits(self) -> dict[str, int]:
        """The limits that groups should be made with. The default group is the host's, and has none."""
        return {key: limit for key, limit in super().plan_comms().limits.items() if key != "world"}

    def plan_comms(self) -> CommsPlan:
        """As `GroupsMixin.plan_comms`, with the limits that the groups were made with."""
        plan = super().plan_comms()
        return CommsPlan.of(plan.layout, plan.features, self._limits, budget=False)

    def _connect_groups(
        self, probe: Callable[[], int] | None, *, phase: Phase = Phase.BOOTSTRAP, timeout: timedelta | None = None
    ) -> tuple[BootstrapReport, Mapping[str, frozenset[OpClass]]]:
        report, connected = super()._connect_groups(probe, phase=phase, timeout=timeout)
        plan = self.plan_comms()
        host = HostBootstrap(
            self.store, training_rank=self.training_rank, layout=plan.layout, features=plan.features,
            limits=plan.limits, device=self.device, probe=probe,
        )  # fmt: skip
        entries, of_host = host.run_host(self.host_groups(), timeout=timeout or self.remaining())
        merged = {
            name: connected.get(name, frozenset()) | of_host.get(name, frozenset())
            for name in connected.keys() | of_host.keys()
        }
        report = replace(
            report, entries=report.entries + entries, skipped=report.skipped - len(of_host.keys() - connected.keys()),
            seconds=report.seconds + sum(entry.seconds for entry in entries),
        )  # fmt: skip
        return report, merged

    def require_bootstrap(self, what: str) -> None:
        """Holds something of the host's back until the bootstrap has run.

        Raises:
            LifecycleError: If it has not, and ``bootstrap.on_missing`` does not say to run it now.
        """
        if self.lifecycle.has_completed(Phase.BOOTSTRAP):
            return
        if self.rl_safe.bootstrap.on_missing == "bootstrap" and self.lifecycle.has_completed(Phase.GROUPS):
            self.report = self.bootstrap()
            return
        raise LifecycleError(
            f"{what} on training rank {self.training_rank}: the bootstrap has not run, so communicators would connect "
            f"later, when memory is full; {self._without_groups}"
        )


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
