"""Runs verl's weight syncs from its driver, and proves them if the settings say so."""

from __future__ import annotations

from typing import Any

from rl_safe_workers.adapters.driver_waits import DriverWaits
from rl_safe_workers.adapters.patches import PassThrough
from rl_safe_workers.adapters.sync_prover import SyncProver


class ProvedTransfer(PassThrough):
    """Wraps verl's ``CheckpointEngineManager``. Proves its weight syncs, and passes everything else through.

    Attributes:
        prover: Proves the syncs. The trainer takes the metrics from it.
    """

    def __init__(self, manager: Any, waits: DriverWaits, *, every: int) -> None:
        """Proves nothing yet.

        Args:
            manager: verl's manager, whose waits have deadlines.
            waits: The driver's waits.
            every: The setting ``prove_sync_freq``.
        """
        super().__init__(manager)
        self.prover = SyncProver(
            waits,
            every=every,
            announce=lambda: manager.actor_wg.rl_safe_prove(),
            sent=lambda: [manager.actor_wg.rl_safe_sent()],
            engines=lambda: [replica.servers[0] for replica in manager.replicas],
        )

    def update_weights(self, global_steps: int | None = None) -> Any:
        """Sends weights as verl does. Sends them again if an engine holds other weights than were sent.

        Raises:
            ConfigError: If an engine's weights cannot be read back; says why.
            WeightSyncError: If an engine holds other weights than were sent, twice in a row.
        """
        step = "" if global_steps is None else f" of step {global_steps}"
        return self.prover.sync(
            lambda: self._stock.update_weights(global_steps),
            what=f"the weight sync{step}",
            # verl's sync needs sleeping engines at its beginning, and leaves them awake.
            before_redoing=self._stock.sleep_replicas,
        )
