"""verl's weight syncs from its driver, each proved if the settings say so."""

from __future__ import annotations

from typing import Any

import ray

from rl_safe_workers.adapters.driver_waits import DriverWaits
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.rollout.sync_proof import HeldWeights, ProvedSyncs, SyncProof

_PROOF = "the proof of the weight sync"
_NOTHING_CAME = HeldWeights(
    digests=(), converted=0, unread=(), faults=("no weights have come in this sync",), seconds=0.0
)


class ProvedTransfer:
    """verl's ``CheckpointEngineManager``, whose weight syncs are proved. Everything else is the manager's own.

    Attributes:
        metrics: Of the last sync that was proved. The trainer takes them out.
    """

    def __init__(self, manager: Any, waits: DriverWaits, *, every: int) -> None:
        """Proves nothing yet.

        Args:
            manager: verl's, with its waits guarded.
            waits: The driver's waits.
            every: The setting ``prove_sync_freq``.
        """
        self._manager, self._waits = manager, waits
        self._syncs = ProvedSyncs(every=every)
        self.metrics: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "_manager":  # asked of a copy that is being made
            raise AttributeError(name)
        return getattr(self._manager, name)

    def update_weights(self, global_steps: int | None = None) -> Any:
        """Sends weights as verl does, and once more if an engine holds others than were sent.

        Raises:
            ConfigError: If an engine's weights cannot be read back; says why.
            WeightSyncError: If an engine holds other weights than were sent, twice in a row.
        """
        answers: list[Any] = []

        def sync(prove: bool) -> SyncProof | None:
            if prove:
                self._waits.bounded(Phase.SYNC, _PROOF, self._announce)
            answers.append(self._manager.update_weights(global_steps))
            return self._waits.bounded(Phase.SYNC, _PROOF, self._compare) if prove else None

        with self._waits.waiting(Phase.SYNC):
            # verl's sync begins with engines that are asleep, and leaves them awake.
            step = "" if global_steps is None else f" of step {global_steps}"
            what = f"the weight sync{step}"
            proved = self._syncs.do(sync, what=what, before_redoing=self._manager.sleep_replicas)
        if proved is not None:
            self.metrics = {
                "rl_safe/sync_proved": float(proved.proof.proved),
                "rl_safe/sync_not_proved": float(proved.proof.not_proved),
                "rl_safe/sync_redone": float(proved.redone),
                "timing_s/rl_safe_sync_proof": proved.seconds,
            }
        return answers[-1]

    def _announce(self) -> None:
        calls = [server.rl_safe_prove.remote() for server in self._servers()]
        self._manager.actor_wg.rl_safe_prove()
        for rank, obstacle in enumerate(ray.get(calls)):
            if obstacle is not None:
                raise ConfigError(f"rollout rank {rank}: weight syncs cannot be proved: {obstacle}")

    def _compare(self) -> SyncProof:
        calls = [server.rl_safe_held.remote() for server in self._servers()]
        sent = self._manager.actor_wg.rl_safe_sent()
        return SyncProof(sent=[sent], held=[held or _NOTHING_CAME for held in ray.get(calls)])

    def _servers(self) -> list[Any]:
        """Returns the server of each engine, by rollout rank."""
        return [replica.servers[0] for replica in self._manager.replicas]
