"""The groups of Megatron's that verl itself issues collectives on, and Megatron does not."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from megatron.core import parallel_state

from rl_safe_workers.comms.bootstrap import Bootstrap, BootstrapStep
from rl_safe_workers.comms.catalog import live_groups
from rl_safe_workers.comms.report import LedgerEntry
from rl_safe_workers.comms.supervision import Supervision
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.topology.groups import Classes, OpClass

DATA_PARALLEL: Classes = (OpClass.REDUCE, OpClass.GATHER_SCATTER)
"""Of the data-parallel group without context parallelism: verl counts tokens and averages the loss over it, and gathers
metrics (transformer_impl.py:842, engine_workers.py:202)."""


WEIGHTS: Classes = (OpClass.GATHER_SCATTER,)
"""Of the expert-parallel and the pipeline group: bridges gather weights over them for each sync with vLLM (mbridge
0.15.1, core/bridge.py:340 and 370)."""


class HostBootstrap(Bootstrap):
    """Connects those groups as a bootstrap connects Megatron's: in order, with deadlines, naming who is missing."""

    def run_host(self, *, timeout: timedelta) -> tuple[tuple[LedgerEntry, ...], Mapping[str, frozenset[OpClass]]]:
        """Connects them. Collective over: the training world; after Megatron's own bootstrap.

        Returns:
            What each op class has cost this rank, and the op classes by torch's name of the group.

        Raises:
            CommunicatorError: As `Bootstrap.run`.
            PhaseTimeoutError: As `Bootstrap.run`.
        """
        call = self._store.add(f"host_bootstrap/calls/{self._rank}", 1)
        wanted: list[tuple[Any, str, Classes]] = [
            (parallel_state.get_data_parallel_group(), "dp", DATA_PARALLEL),
            (parallel_state.get_expert_model_parallel_group(), "ep", WEIGHTS),
            (parallel_state.get_pipeline_model_parallel_group(), "pp", WEIGHTS),
        ]
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
