"""Agreements: every rank reports, training rank 0 decides, every rank learns of it. Over the store, with a deadline.

No collective and no process group takes part, so that nothing can be left hanging in one, and ranks may ask without
waiting whether it is time yet.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store

from rl_safe_workers.errors import Awaited, PhaseTimeoutError, RlSafeError, RunError, StoreLostError, error_named
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id, trainer_ids
from rl_safe_workers.worlds.attendance import absentees, attend


class Agreement:
    """One decision among ``size`` ranks. Each subject is used once; reports and decisions are bytes.

    Every method raises StoreLostError if the process that owns the store has ended.
    """

    def __init__(self, store: Store, subject: str, *, phase: Phase, rank: int, size: int) -> None:
        """Prepares an agreement; every rank with the same subject, phase and size.

        Args:
            store: A store that every rank is connected to.
            subject: A name that no other agreement of this run has, e.g. ``"save/3/prepare"``.
            phase: The phase whose deadline counts, for errors.
            rank: This process's rank; 0 decides.
            size: Number of ranks.
        """
        self._store = PrefixStore(f"agreement/{subject}", store)
        self._phase, self._rank, self._size = phase, rank, size

    def report(self, data: bytes) -> None:
        """Publishes this rank's report. Does not wait."""
        self._set(f"report/{self._rank}", data)
        with self._store_in_reach():
            attend(self._store, "came", self._rank)

    def reports(self, timeout: timedelta) -> list[bytes]:
        """Waits for every rank's report; returns them by rank. Rank 0 calls it.

        Raises:
            PhaseTimeoutError: If some are missing when the time is up; names the ranks.
        """
        keys = [f"report/{rank}" for rank in range(self._size)]
        self._wait(keys, timeout)
        with self._store_in_reach():
            return [zlib.decompress(data) for data in self._store.multi_get(keys)]

    def all_reported(self) -> bool:
        """Whether every rank has reported. Does not wait."""
        return self._has([f"report/{rank}" for rank in range(self._size)])

    def decide(self, data: bytes) -> None:
        """Publishes the decision. Rank 0 calls it, once."""
        self._set("decision", data)

    def decided(self) -> bool:
        """Whether there is a decision. Does not wait."""
        return self._has(["decision"])

    def decision(self, timeout: timedelta) -> bytes:
        """Waits for the decision.

        Raises:
            PhaseTimeoutError: If there is none when the time is up; names the ranks that have not reported, or rank 0.
        """
        self._wait(["decision"], timeout)
        with self._store_in_reach():
            return zlib.decompress(self._store.get("decision"))

    def settle(
        self,
        timeout: timedelta,
        *,
        failure: Exception | None = None,
        report: Any = None,
        decide: Callable[[Sequence[Any]], Any] = lambda reports: None,
    ) -> Any:
        """Reports, has rank 0 decide upon all reports, and returns its decision; raises on every rank if one failed.

        Args:
            timeout: Longest wait, for the reports and for the decision.
            failure: What this rank has failed with; None if it is well.
            report: What it tells rank 0; fit for JSON.
            decide: Called on rank 0 with every rank's report if all are well. Its value must be fit for JSON.

        Raises:
            RlSafeError: ``failure`` on the rank that has one, as a RunError if it is not one of ours; on the others an
                error of the same class, naming that rank, as if ``decide`` raises.
        """
        self.report(json.dumps([None if failure is None else _describe(failure), report]).encode())
        if self._rank == 0:
            self.decide(json.dumps(self._decide(timeout, decide)).encode())
        described, culprit, value = json.loads(self.decision(timeout))
        if isinstance(failure, RlSafeError):
            raise failure
        if failure is not None:
            raise RunError(_describe(failure)[1]) from failure
        if described is not None:
            error = error_named(*described)
            error.culprit = trainer_id(culprit)
            raise error
        return value

    def _decide(self, timeout: timedelta, decide: Callable[[Sequence[Any]], Any]) -> tuple[Any, int | None, Any]:
        """Returns the failure, the rank that it is of, and the decision."""
        reports = [json.loads(data) for data in self.reports(timeout)]
        failures = [(rank, described) for rank, (described, _) in enumerate(reports) if described is not None]
        if failures:
            text = "; ".join(f"training rank {rank}: {text}" for rank, (_, text) in failures)
            return (failures[0][1][0], text), failures[0][0], None
        try:
            return None, None, decide([report for _, report in reports])
        except Exception as error:
            return _describe(error), 0, None

    def forget(self) -> None:
        """Removes this rank's report, and on rank 0 the decision, from the store; once no rank needs them any more."""
        with self._store_in_reach():
            self._store.delete_key(f"report/{self._rank}")
            for key in ("decision", "came") if self._rank == 0 else ():
                self._store.delete_key(key)

    def _set(self, key: str, data: bytes) -> None:
        with self._store_in_reach():
            # The store takes bytes, whatever its stub says.
            self._store.set(key, zlib.compress(data, 1))  # type: ignore[arg-type]

    def _has(self, keys: list[str]) -> bool:
        with self._store_in_reach():
            return bool(self._store.check(keys))

    @contextmanager
    def _store_in_reach(self) -> Iterator[None]:
        try:
            yield
        except DistNetworkError as error:
            raise StoreLostError(
                f"phase {self._phase}: rank {self._rank} of the training world has lost the run's store: its owner, "
                "training rank 0, has ended"
            ) from error

    def _wait(self, keys: list[str], timeout: timedelta) -> None:
        started_s = time.monotonic()
        try:
            with self._store_in_reach():
                self._store.wait(keys, timeout)
        except DistStoreError:
            with self._store_in_reach():
                silent = absentees(self._store, "came", range(self._size))
            raise PhaseTimeoutError(
                phase=self._phase,
                awaited=Awaited("training world", frozenset(trainer_ids(range(self._size)))),
                missing=trainer_ids(silent or [0]),
                waited_s=time.monotonic() - started_s,
                setting=f"rl_safe.timeouts.{self._phase}",
            ) from None


def _describe(error: Exception) -> tuple[str, str]:
    """Returns the class and the message of an error, for `errors.error_named`."""
    text = str(error) if isinstance(error, RlSafeError) else f"{type(error).__name__}: {error}"
    return type(error).__name__, text
