"""Runs a host's weight syncs from its driver. If a proof is due, compares the digests of both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray

from rl_safe_workers.adapters.driver_waits import DriverWaits
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.rollout.sync_proof import NOTHING_CAME, ProvedSyncs, SentWeights, SyncProof

T = TypeVar("T")

_PROOF = "the proof of the weight sync"


class SyncProver:
    """Proves a host's weight syncs.

    Attributes:
        metrics: Metrics of the last proved sync, until the host takes them.
    """

    def __init__(
        self,
        waits: DriverWaits,
        *,
        every: int,
        announce: Callable[[], object],
        sent: Callable[[], Sequence[SentWeights]],
        engines: Callable[[], Sequence[Any]],
    ) -> None:
        """Stores its arguments.

        Args:
            waits: The driver's waits.
            every: The setting ``prove_sync_freq``.
            announce: Tells the trainers to take digests in the next sync. Together, these trainers send all weights.
            sent: Returns the digests of each of these trainers.
            engines: Lists the engines' actors in order of rollout rank. Each has the remote methods ``rl_safe_prove``
                and ``rl_safe_held`` of a `ProvedWorker`.
        """
        self._waits, self._announce, self._sent, self._engines = waits, announce, sent, engines
        self._syncs = ProvedSyncs(every=every)
        self.metrics: dict[str, float] = {}

    def sync(self, send: Callable[[], T], *, what: str, before_redoing: Callable[[], object]) -> T:
        """Sends weights as the host does. Sends them again if an engine holds other weights than were sent.

        Args:
            send: Does the host's sync.
            what: Name of the sync, for messages.
            before_redoing: Puts the engines back into the state in which a sync begins.

        Returns:
            The value of the last ``send``.

        Raises:
            ConfigError: If an engine's weights cannot be read back; says why.
            WeightSyncError: If an engine holds other weights than were sent, twice in a row.
        """
        answers: list[T] = []

        def once(prove: bool) -> SyncProof | None:
            if prove:
                self._waits.bounded(Phase.SYNC, _PROOF, self._prove)
            answers.append(send())
            return self._waits.bounded(Phase.SYNC, _PROOF, self._compare) if prove else None

        with self._waits.waiting(Phase.SYNC):
            proved = self._syncs.run(once, what=what, before_redoing=before_redoing)
        if proved is not None:
            self.metrics = proved.metrics
        return answers[-1]

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of the sync that was proved since the last call; empty if no sync was proved."""
        found, self.metrics = self.metrics, {}
        return found

    def _prove(self) -> None:
        calls = [engine.rl_safe_prove.remote() for engine in self._engines()]
        self._announce()
        for rank, obstacle in enumerate(ray.get(calls)):
            if obstacle is not None:
                raise ConfigError(f"rollout rank {rank}: weight syncs cannot be proved: {obstacle}")

    def _compare(self) -> SyncProof:
        calls = [engine.rl_safe_held.remote() for engine in self._engines()]
        sent = self._sent()
        return SyncProof(sent=sent, held=[held or NOTHING_CAME for held in ray.get(calls)])
