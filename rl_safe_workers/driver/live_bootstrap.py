"""Runs only the bootstrap of a recipe: starts the trainers, connects every communicator, and ends."""

from __future__ import annotations

import uuid
from copy import deepcopy
from dataclasses import dataclass

from rl_safe_workers.comms.report import BootstrapReport
from rl_safe_workers.config import RunConfig
from rl_safe_workers.driver.cluster.cluster import Cluster
from rl_safe_workers.driver.cluster.interrupts import Interrupts
from rl_safe_workers.driver.outputs.console import RunConsole
from rl_safe_workers.driver.session import Session
from rl_safe_workers.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBootstrap:
    """The cost of a bootstrap.

    Example: ``bootstrap_live(config, RunConsole())``
    """

    ledgers: tuple[BootstrapReport, ...]
    """The ledger of each training rank, in the order of ranks."""
    seconds: dict[str, float]
    """Seconds of each phase, measured in the driver."""


def bootstrap_live(config: RunConfig, console: RunConsole) -> LiveBootstrap:
    """Connects the recipe's groups on the nodes that the run would use, without a model and without rollout ranks.

    Blocks; each phase has its timeout. Leaves no process behind, also after a failure. Main thread only.

    Args:
        config: A recipe whose layout has been checked. It is not changed.
        console: Shows the phases.

    Raises:
        UsageError: If the cluster has less than the trainers need.
        RunError: If Ray cannot be started or joined, a rank fails or does not answer, or the run is interrupted.
    """
    alone = _trainers_alone(config)
    interrupts, patience_s = Interrupts(), alone.rl_safe.teardown.kill_after_s
    cluster = Cluster(alone, run_id=uuid.uuid4().hex[:12], interrupts=interrupts)
    session = Session(alone, cluster, console, interrupts)
    with interrupts.listening():
        try:
            session.connect()
            disagreed = session.teardown()
        finally:
            cluster.close(kill_after_s=patience_s)
    if disagreed:
        raise RunError("; ".join(f"training rank {rank} at teardown: {text}" for rank, text in disagreed.items()))
    seconds = {str(phase): total.total_s for phase, total in session.totals.items()}
    return LiveBootstrap(ledgers=tuple(session.ledgers), seconds=seconds)


def _trainers_alone(config: RunConfig) -> RunConfig:
    alone = deepcopy(config)
    alone.cluster.num_rollouts, alone.cluster.colocated = 0, False
    alone.trainer.save_freq = -1
    return alone
