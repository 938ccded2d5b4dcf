"""Collective work that no deadline of a backend covers, under one of ours: whoever is missing or fails is named by all.

NCCL connects at the first collective of a group, and its timeouts do not count yet. So the ranks tell each other over
the store that they have come, do the work in a thread that can be left behind, and look meanwhile whether another rank
has given up.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store

from rl_safe_workers.errors import (
    Awaited,
    CommunicatorError,
    Failure,
    PhaseTimeoutError,
    StoreLostError,
    foreign_cause,
)
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id, trainer_ids
from rl_safe_workers.worlds.attendance import absentees, attend

logger = logging.getLogger(__name__)

_SLICE = timedelta(milliseconds=500)
"""How long a rank waits before it looks whether another one has given up."""
_LOOK_S = 0.02
_BEAT_S = 0.1
"""How often a rank shows that it lives, while another one looks who does."""
_BETWEEN = "null"
"""Where a rank is that is in no part."""
_COLLECTIVE = ("torch/distributed/distributed_c10d.py", "torch/cuda/__init__.py")
"""Where a thread is that issues a collective, or waits for the device to finish it."""
_GRACE = timedelta(seconds=1)
"""What those wait longer who can only hear of a rank that is missing elsewhere."""


def _slot(name: str) -> str:
    """A short key for a name of any length."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _is_in_a_collective(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COLLECTIVE):
            return True
        frame = frame.f_back
    return False


class Supervision:
    """One piece of work of a phase among all training ranks, in parts that each concern some of them."""

    def __init__(
        self, store: Store, subject: str, call: int, *, phase: Phase, training_rank: int, size: int, timeout: timedelta
    ) -> None:
        """Begins; the deadline counts from now.

        Args:
            store: A store that every training rank is connected to.
            subject: A name of the work, e.g. ``"bootstrap"``.
            call: How often it was begun, this time included; the same on all ranks.
            phase: The phase whose timeout counts, for errors.
            training_rank: This process's rank.
            size: Number of training ranks.
            timeout: Longest time for all parts together.
        """
        # A connection of its own: NCCL's first collectives wait in the one that a group was made with, and whoever
        # waits there keeps everyone else in the process out.
        connection: Store = store.clone()  # type: ignore[attr-defined]
        self._store = PrefixStore(f"{subject}/{call}", connection)
        self._before = PrefixStore(f"{subject}/{call - 1}", connection)
        self._keys: dict[str, None] = {}
        """What this rank has put there, and is to remove."""
        self._phase, self._rank, self._size = phase, training_rank, size
        self._started_s = time.monotonic()
        self._deadline_s = self._started_s + timeout.total_seconds()

    def part(self, name: str, ranks: Sequence[int], work: Callable[[], Any]) -> Any:
        """Does a part of the work once all who take part have come; returns its value.

        Keys are short, whatever the name: TCPStore drops a connection over a key of more than 8 KiB, which the ranks of
        a large group fill.

        Collective over: ``ranks``. Every rank goes through its parts in an order that all agree on.

        Args:
            name: For errors; unique within the work, e.g. ``"EXPERT_DATA_PARALLEL_GROUP [0, 2]"``.
            ranks: Training ranks that take part, this one among them.
            work: Called in a thread.

        Raises:
            PhaseTimeoutError: On every training rank, if some do not come or do not finish in time; names them.
            CommunicatorError: On every training rank, if ``work`` raises on one; names it.
        """
        self._arrive(f"part/{_slot(name)}", name, ranks)
        value = self._run(name, work, ranks)
        self._set(f"at/{self._rank}", _BETWEEN)
        return value

    def alone(self, name: str, work: Callable[[], Any]) -> Any:
        """Does what no other rank takes part in, but all wait for in the end; returns its value. Not collective.

        Args:
            name: For errors.
            work: Called in a thread.

        Raises:
            PhaseTimeoutError: As `part`.
            CommunicatorError: As `part`.
        """
        return self._run(name, work, [self._rank])

    def compare(self, name: str, mine: Mapping[str, Any], members: Sequence[Sequence[int]]) -> None:
        """Makes sure that every rank has the same plan for what it shares with others.

        Collective over: the training world. Each rank compares with its next neighbour in every group: around a group
        the comparisons close a ring, so equal neighbours mean that all members agree. Neighbours also compare the order
        of the groups that they share.

        Args:
            name: For keys, e.g. ``"plan"``.
            mine: This rank's plan by group, in order; fit for JSON.
            members: Training ranks of each group, in the plan's order.

        Raises:
            CommunicatorError: On every rank, if two plans differ.
            PhaseTimeoutError: On every rank, if one publishes none in time.
        """
        slots = [_slot(key) for key in mine]
        planned = json.loads(json.dumps(dict(zip(slots, mine.values(), strict=True))))
        self._set(f"{name}/{self._rank}", json.dumps(planned))
        self._ask(attend, self._store, f"{name}/came", self._rank)
        if self._rank == 0:
            self._keys[f"{name}/came"] = None
        others: dict[int, dict[str, Any]] = {}
        for key, slot, ranks in zip(mine, slots, members, strict=True):
            neighbour = ranks[(ranks.index(self._rank) + 1) % len(ranks)]
            if neighbour not in others:
                self._await(f"{name}/{neighbour}", partial(self._absent, name, ranks), part=key, ranks=ranks)
                others[neighbour] = json.loads(self._ask(self._store.get, f"{name}/{neighbour}"))
            theirs = others[neighbour]
            if theirs.get(slot) != planned[slot]:
                text = f"it plans {planned[slot]}, but rank {neighbour} {theirs.get(slot)}"
            elif [s for s in planned if s in theirs] != [s for s in theirs if s in planned]:
                text = f"it connects the groups that it shares with rank {neighbour} in another order"
            else:
                continue
            self._give_up(key, Failure(f"{text}: their configurations differ"))
        self._arrive(f"{name}/agreed", f"the {self._phase}'s plan", range(self._size))
        self._set(f"at/{self._rank}", _BETWEEN)

    def finish(self) -> None:
        """Waits until all training ranks are through. Collective over: the training world.

        Raises:
            PhaseTimeoutError: As `part`, whichever part it was in.
            CommunicatorError: As `part`.
        """
        self._deadline_s += _GRACE.total_seconds()
        keys, self._keys = self._keys, {}
        self._arrive("end", f"the {self._phase}", range(self._size))
        # All are through, so nobody reads these any more; of the call before nobody waits for the end either.
        for key in keys:
            self._ask(self._store.delete_key, key)
        for key in ("end/came", "end/count", "end/all", "failed", "judge") if self._rank == 0 else ():
            self._ask(self._before.delete_key, key)

    def _arrive(self, key: str, name: str, ranks: Sequence[int]) -> None:
        self._set(f"at/{self._rank}", json.dumps([key, name, list(ranks)]))
        self._ask(attend, self._store, f"{key}/came", self._rank)
        if self._ask(self._store.add, f"{key}/count", 1) == len(ranks):
            if key != "end":
                self._keys |= dict.fromkeys((f"{key}/count", f"{key}/came"))
            # Those who have come before may have given up since.
            self._heed_failures()
            self._set(f"{key}/all", "")
            return
        self._await(f"{key}/all", partial(self._absent, key, ranks), part=name, ranks=ranks)

    def _absent(self, key: str, ranks: Sequence[int]) -> list[int]:
        absent: list[int] = self._ask(absentees, self._store, f"{key}/came", ranks)
        return absent

    def _await(self, key: str, absent: Callable[[], list[int]], *, part: str, ranks: Sequence[int]) -> None:
        """Waits for a key; gives up with those that are absent when the time is up."""
        while not self._ask(self._has_come, key):
            self._beat()
            self._heed_failures()
            late_s = time.monotonic() - self._deadline_s
            # Whoever has come meanwhile may have gone on already, and says so at once unless it has died.
            if late_s > 0 and (absent() or late_s > _GRACE.total_seconds()):
                self._let_one_judge()
                if not self._ask(self._has_come, key):
                    self._report_missing(*self._root(part, ranks, absent()))

    def _root(self, part: str, members: Sequence[int], missing: list[int]) -> tuple[str, Sequence[int], list[int]]:
        """Returns the part that everyone waits for in the end, its members, and who is missing there.

        Who is missing here may be waiting at another group, for someone who is missing there, or be inside another
        group's collective, which does not end.
        """
        inside: dict[int, tuple[str, Sequence[int]]] = {}
        seen: set[int] = set()
        while waiting := [rank for rank in missing if rank not in seen]:
            rank = waiting[0]
            seen.add(rank)
            place = json.loads(self._store.get(f"at/{rank}")) if self._store.check([f"at/{rank}"]) else None
            if place is None:
                continue
            key, name, ranks = place
            if absent := self._absent(key, ranks):
                part, members, missing = name, ranks, absent
            else:
                inside[rank] = name, ranks
        stuck = [inside[rank] for rank in missing if rank in inside]
        if not stuck or len(stuck) < len(missing):
            return part, members, [rank for rank in missing if rank not in inside]
        name, ranks = stuck[0]
        return name, ranks, self._silent(ranks)

    def _has_come(self, key: str) -> bool:
        try:
            self._store.wait([key], min(_SLICE, max(timedelta(milliseconds=1), self._left())))
        except DistStoreError:
            return False
        return True

    def _left(self) -> timedelta:
        return timedelta(seconds=self._deadline_s - time.monotonic())

    def _run(self, name: str, work: Callable[[], Any], ranks: Sequence[int]) -> Any:
        values: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                values.append(work())
            except BaseException as error:
                errors.append(error)

        # Not of a pool, whose threads the end of the process waits for.
        thread = threading.Thread(target=run, name=f"{self._phase} {name}", daemon=True)
        thread.start()
        looked_s = time.monotonic()
        thread.join(_LOOK_S)
        while thread.is_alive():
            if time.monotonic() - looked_s > _SLICE.total_seconds():
                looked_s = time.monotonic()
                self._beat()
                self._heed_failures()
            if time.monotonic() > self._deadline_s:
                self._set(f"elsewhere/{self._rank}", "" if _is_in_a_collective(thread) else "1")
                self._let_one_judge()
                self._report_missing(name, ranks, self._silent(ranks))
            thread.join(_LOOK_S)
        if errors:
            if self._is_deadline(errors[0]):
                self._let_one_judge()
                self._report_missing(name, ranks, self._silent(ranks))
            self._report(name, errors[0])
        return values[0]

    def _is_deadline(self, error: BaseException) -> bool:
        """Whether a backend has only given up at the deadline, a little before us: its collectives share it."""
        return foreign_cause(error) is ForeignCause.TIMEOUT and self._left() < _SLICE

    def _beat(self) -> None:
        self._keys[f"beat/{self._rank}"] = None
        self._ask(self._store.add, f"beat/{self._rank}", 1)

    def _let_one_judge(self) -> None:
        """Lets the first who finds the time up find out who is missing, and the others wait to be told.

        It takes requests in proportion to the ranks, which all of them together would be the square of. They return,
        to look for themselves, if they are not told.
        """
        first = self._ask(self._store.compare_set, "judge", "", str(self._rank))
        if int(first) != self._rank:
            self._listen(2 * _SLICE + _GRACE)

    def _listen(self, patience: timedelta) -> None:
        """Shows that this rank lives, until another one gives up or the time has passed."""
        until_s = time.monotonic() + patience.total_seconds()
        while time.monotonic() < until_s:
            self._beat()
            self._heed_failures()
            time.sleep(_BEAT_S)

    def _silent(self, ranks: Sequence[int]) -> list[int]:
        """Those among members whose process does nothing any more, or who are not in the collective but before it.

        None if all are in it, and it does not end.
        """
        before = [self._ask(self._store.add, f"beat/{rank}", 0) for rank in ranks]
        self._listen(2 * _SLICE)
        after = [self._ask(self._store.add, f"beat/{rank}", 0) for rank in ranks]
        silent = [rank for rank, a, b in zip(ranks, before, after, strict=True) if a == b]
        return silent or [rank for rank in ranks if self._is_elsewhere(rank)]

    def _is_elsewhere(self, rank: int) -> bool:
        key = f"elsewhere/{rank}"
        return bool(self._ask(self._store.check, [key]) and self._ask(self._store.get, key))

    def _set(self, key: str, value: str) -> None:
        self._keys[key] = None
        self._ask(self._store.set, key, value)

    def _report_missing(self, name: str, ranks: Sequence[int], missing: Sequence[int]) -> None:
        late = PhaseTimeoutError(
            phase=self._phase,
            awaited=Awaited(name, frozenset(trainer_ids(ranks))),
            missing=trainer_ids(missing),
            waited_s=time.monotonic() - self._started_s,
            setting=f"rl_safe.timeouts.{self._phase}",
        )
        self._tell({"late": late.as_json()})

    def _report(self, name: str, error: BaseException) -> None:
        """Tells all others, unless one of them was first; its failure is the cause of this one, then."""
        # A broken connection is how the others' end shows itself; who was first says so within a slice.
        if isinstance(error, RuntimeError):
            self._wait_for_the_first()
        self._give_up(name, Failure.of(error), cause=error)

    def _wait_for_the_first(self) -> None:
        until_s = time.monotonic() + _SLICE.total_seconds()
        while time.monotonic() < until_s:
            self._heed_failures()
            time.sleep(_LOOK_S)

    def _give_up(self, part: str, failure: Failure, *, cause: BaseException | None = None) -> None:
        self._tell({"part": part, "rank": self._rank, "failure": failure}, cause=cause)

    def _tell(self, failure: dict[str, Any], *, cause: BaseException | None = None) -> None:
        first = self._ask(self._store.compare_set, "failed", "", json.dumps(failure))
        self._raise(json.loads(first), cause=cause)

    def _heed_failures(self) -> None:
        if self._ask(self._store.check, ["failed"]):
            self._raise(json.loads(self._store.get("failed")))

    def _raise(self, failure: dict[str, Any], *, cause: BaseException | None = None) -> None:
        if "late" in failure:
            raise PhaseTimeoutError.from_json(failure["late"])
        text, foreign = Failure.from_json(failure["failure"])
        raise CommunicatorError(
            f"phase {self._phase}: training rank {failure['rank']} failed in {failure['part']}: {text}",
            culprit=trainer_id(failure["rank"]),
            foreign=foreign,
        ) from (cause if failure["rank"] == self._rank else None)

    def _ask(self, request: Callable[..., Any], *args: Any) -> Any:
        try:
            return request(*args)
        except DistNetworkError as error:
            raise StoreLostError(
                f"phase {self._phase}: training rank {self._rank} has lost the run's store: its owner, training rank "
                "0, has ended"
            ) from error
