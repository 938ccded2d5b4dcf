"""Runs verl's weight syncs from its driver. Proves them, and checks that engines can take packed ones."""

from __future__ import annotations

from typing import Any

import ray

from rl_safe_workers.adapters.driver_waits import DriverWaits
from rl_safe_workers.adapters.patches import PassThrough
from rl_safe_workers.adapters.sync_prover import SyncProver
from rl_safe_workers.adapters.verl.settings import NODE
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.lifecycle import Phase


class ProvedTransfer(PassThrough):
    """Wraps verl's ``CheckpointEngineManager``. Proves its weight syncs, and passes everything else through.

    Attributes:
        prover: Proves the syncs. The trainer takes the metrics from it.
    """

    def __init__(self, manager: Any, waits: DriverWaits, *, every: int, is_packed: bool = False) -> None:
        """Stores its arguments.

        Args:
            manager: verl's manager, whose waits have deadlines.
            waits: The driver's waits.
            every: The setting ``prove_sync_freq``.
            is_packed: The setting ``packed_sync``.
        """
        super().__init__(manager)
        self._waits, self._is_packed, self._is_checked = waits, is_packed, False
        self.prover = SyncProver(
            waits,
            every=every,
            announce=lambda: manager.actor_wg.rl_safe_prove(),
            sent=lambda: manager.actor_wg.rl_safe_sent(),
            engines=self._engines,
        )

    def _engines(self) -> list[Any]:
        return [replica.servers[0] for replica in self._stock.replicas]

    def update_weights(self, global_steps: int | None = None) -> Any:
        """Sends weights as verl does. Sends them again if an engine holds other weights than were sent.

        Raises:
            ConfigError: If an engine's weights cannot be read back, or it cannot take packed weights; says why.
            WeightSyncError: If an engine holds other weights than were sent, twice in a row.
        """
        if self._is_packed and not self._is_checked:
            self._learn_anew()
            self._is_checked = True
        step = "" if global_steps is None else f" of step {global_steps}"
        return self.prover.sync(
            lambda: self._stock.update_weights(global_steps),
            what=f"the weight sync{step}",
            before_redoing=self._before_redoing,
        )

    def _before_redoing(self) -> None:
        if self._is_packed:
            self._learn_anew()  # the wrong weights may have come the direct way
        # verl's sync needs sleeping engines at its beginning, and leaves them awake.
        self._stock.sleep_replicas()

    def _learn_anew(self) -> None:
        """Makes every engine load the next packed sync by its loaders.

        Raises:
            ConfigError: If an engine cannot take packed weights; says why.
        """
        calls = [engine.rl_safe_learn_anew.remote() for engine in self._engines()]
        what = "the preparation of a packed weight sync"
        obstacles = self._waits.bounded(Phase.SYNC, what, lambda: ray.get(calls), workers_first=False)
        for rank, obstacle in enumerate(obstacles):
            if obstacle is not None:
                raise ConfigError(f"rollout rank {rank}: {NODE}.packed_sync=true: {obstacle}")
