"""Roll calls: every rank reports over the store before a collective phase, so that a missing one can be named."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store

from rl_safe_workers.errors import Awaited, PhaseTimeoutError, StoreLostError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId
from rl_safe_workers.worlds.attendance import absentees, attend

logger = logging.getLogger(__name__)


class RollCall:
    """Presence checks among some ranks over a store. No collective and no process group is involved.

    Every rank must make the same sequence of calls for a phase; calls are numbered per phase on each rank.
    """

    def __init__(self, store: Store, *, world: str, group_rank: int, members: Sequence[RankId]) -> None:
        """Prepares roll calls.

        Args:
            store: A store that every rank is connected to.
            world: Name of the world, for keys and messages, e.g. ``"training world"``.
            group_rank: This process's rank in that world.
            members: The ranks of that world, in their order there.
        """
        self._store = PrefixStore(f"roll_call/{world}", store)
        self._world, self._rank, self._members, self._size = world, group_rank, members, len(members)
        self._calls: dict[Phase, int] = {}

    def arrive(self, phase: Phase, *, timeout: timedelta) -> None:
        """Reports this rank and waits for all others. Collective over: every rank of the world, in any order.

        Raises:
            PhaseTimeoutError: If not all ranks arrived within ``timeout``; names those missing.
            StoreLostError: If the process that owns the store has ended.
        """
        call = self._calls[phase] = self._calls.get(phase, 0) + 1
        prefix = f"{phase}/{call}"
        with self._store_in_reach(phase):
            attend(self._store, f"{prefix}/came", self._rank)
            if self._store.add(f"{prefix}/count", 1) == self._size:
                self._store.set(f"{prefix}/complete", "1")
            else:
                self._wait_for([f"{prefix}/complete"], phase, timeout, self._absent)
            self._forget(f"{phase}/{call - 1}")

    def _forget(self, prefix: str) -> None:
        """Removes an earlier call's keys: everyone has made a later one, so nobody waits for it any more."""
        if self._rank == 0:
            for key in ("came", "count", "complete"):
                self._store.delete_key(f"{prefix}/{key}")

    def sign_off(self, phase: Phase, *, timeout: timedelta) -> None:
        """Reports that this rank needs the store no more. Rank 0, the owner, waits for all others; nobody else waits.

        After `arrive` rank 0 could end its process, and the store with it, before the others have had their answer.

        Raises:
            PhaseTimeoutError: On rank 0, if not all others signed off within ``timeout``; names those missing.
        """
        prefix = f"{phase}/signed_off"
        with self._store_in_reach(phase):
            if self._rank != 0:
                # Unlike add, set waits for no answer, which an owner who is free to go might not live to give.
                self._store.set(f"{prefix}/{self._rank}", "1")
                return
            self._wait_for([f"{prefix}/{rank}" for rank in range(1, self._size)], phase, timeout, self._not_signed_off)

    def _not_signed_off(self, phase: Phase) -> list[int]:
        return [rank for rank in range(1, self._size) if not self._store.check([f"{phase}/signed_off/{rank}"])]

    def _absent(self, phase: Phase) -> list[int]:
        return absentees(self._store, f"{phase}/{self._calls[phase]}/came", range(self._size))

    def _wait_for(
        self, keys: list[str], phase: Phase, timeout: timedelta, missing: Callable[[Phase], list[int]]
    ) -> None:
        start_s = time.monotonic()
        try:
            self._store.wait(keys, timeout)
        except DistStoreError:
            raise PhaseTimeoutError(
                phase=phase,
                awaited=Awaited(self._world, frozenset(self._members)),
                missing=[self._members[rank] for rank in missing(phase)],
                waited_s=time.monotonic() - start_s,
                setting=f"rl_safe.timeouts.{phase}",
            ) from None

    @contextmanager
    def _store_in_reach(self, phase: Phase) -> Iterator[None]:
        try:
            yield
        except DistNetworkError as error:
            raise StoreLostError(
                f"phase {phase}: rank {self._rank} of {self._world} has lost the run's store: "
                "its owner, training rank 0, has ended"
            ) from error
