"""Runs collectives that NCCL's timeout does not cover under our own deadline. Every rank names the same culprit.

NCCL connects at the first collective of a group, and its timeouts do not count yet. So each rank first reports its
arrival over the store. It then does the work in a thread that it can leave behind, and watches the store meanwhile for
a rank that has given up.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

from rl_safe_workers.control.deadline import Background, Deadline, DeadlineExceededError
from rl_safe_workers.control.failure import Failure
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import Awaited, CommunicatorError, PhaseTimeoutError, foreign_cause
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.frames import frames_of_thread, telling_frame
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import trainer_id, trainer_ids
from rl_safe_workers.setting_names import timeout_setting

T = TypeVar("T")

_SLICE = timedelta(milliseconds=500)
"""Time between two checks whether another rank has given up."""
_LOOK_S = 0.02
"""Seconds between two checks for the first failure."""
_BEAT_S = 0.1
"""Seconds between two signs of life of a rank, while another rank looks for live ones."""
_BETWEEN = b"null"
"""The place of a rank that is between two parts."""
_COLLECTIVE = ("torch/distributed/distributed_c10d.py", "torch/cuda/__init__.py")
"""Source files of a thread that issues a collective, or waits for the device to finish it."""
_NAMED = 4
"""Most missing ranks whose line of code an error names."""
_END = "end"
_GRACE = timedelta(seconds=1)
"""Extra time for ranks that depend on another rank's lookup."""


def _slot(name: str) -> str:
    """A short key for a name of any length."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _elsewhere(thread: threading.Thread) -> str:
    """Returns the line of code that a thread executes; empty if it is in a collective."""
    frames = frames_of_thread(thread)
    if any(frame.file.endswith(_COLLECTIVE) for frame in frames):
        return ""
    return str(telling_frame(frames) or "an unknown line")


class Supervision:
    """One piece of work of a phase, shared by all training ranks. It has parts, each for some of the ranks."""

    def __init__(self, control: ControlPlane, subject: str, *, phase: Phase, timeout: timedelta) -> None:
        """Begins; the deadline counts from now.

        Args:
            control: This rank's place in the training world.
            subject: A name of the work, e.g. ``"bootstrap"``.
            phase: The phase whose timeout counts, for errors.
            timeout: Longest time for all parts together.
        """
        self._operation = control.begin(subject, phase=phase)
        self._phase, self._rank, self._size = phase, control.rank, control.size
        self._deadline = Deadline.after(timeout)
        self._beats = 0

    def part(self, name: str, ranks: Sequence[int], work: Callable[[], Any]) -> Any:
        """Does a part of the work once all ranks of the part have come; returns its value.

        Store keys are hashes of names, because TCPStore drops a connection over a key of more than 8 KiB, and the name
        of a large group can be longer.

        Collective over: ``ranks``. All ranks must do their common parts in the same order.

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
        self._operation.put(f"at/{self._rank}", _BETWEEN)
        return value

    def alone(self, name: str, work: Callable[[], Any]) -> Any:
        """Does work of this rank alone, for which all ranks wait at the end; returns its value. Not collective.

        Args:
            name: For errors.
            work: Called in a thread.

        Raises:
            PhaseTimeoutError: As `part`.
            CommunicatorError: As `part`.
        """
        return self._run(name, work, [self._rank])

    def compare(self, name: str, mine: Mapping[str, Any], members: Sequence[Sequence[int]]) -> None:
        """Checks that all members of each group have the same plan for it.

        Collective over: the training world. Each rank compares its plan with that of its next neighbour in every group.
        The comparisons of a group form a ring, so if all neighbours agree, all members agree. Neighbours also compare
        the order of the groups that they share.

        Args:
            name: For keys, e.g. ``"plan"``.
            mine: This rank's plan by group, in order; fit for JSON.
            members: Training ranks of each group, in the plan's order.

        Raises:
            CommunicatorError: On every rank, if two plans differ.
            PhaseTimeoutError: On every rank, if one does not publish its plan in time.
        """
        slots = [_slot(key) for key in mine]
        planned = json.loads(json.dumps(dict(zip(slots, mine.values(), strict=True))))
        self._operation.put(f"{name}/{self._rank}", json.dumps(planned).encode())
        everyone, what = range(self._size), f"the {self._phase}'s plan"
        self._operation.come(name, everyone)
        # While this rank waits for its neighbour's plan, ranks that have theirs may already miss it at the agreement
        # below. This note leads them (`_root`) to the rank that has published no plan.
        self._operation.put(f"at/{self._rank}", json.dumps([name, what, list(everyone)]).encode())
        others: dict[int, dict[str, Any]] = {}
        for key, slot, ranks in zip(mine, slots, members, strict=True):
            neighbour = ranks[(ranks.index(self._rank) + 1) % len(ranks)]
            if neighbour not in others:
                theirs_come = partial(self._plan_of, f"{name}/{neighbour}")
                absent = partial(self._operation.absent, name, ranks)
                others[neighbour] = self._await(theirs_come, absent, part=key, ranks=ranks)
            theirs = others[neighbour]
            if theirs.get(slot) != planned[slot]:
                text = f"it plans {planned[slot]}, but rank {neighbour} {theirs.get(slot)}"
            elif [s for s in planned if s in theirs] != [s for s in theirs if s in planned]:
                text = f"it connects the groups that it shares with rank {neighbour} in another order"
            else:
                continue
            self._give_up(key, Failure(f"{text}: their configurations differ"))
        self._arrive(f"{name}/agreed", what, everyone)
        self._operation.put(f"at/{self._rank}", _BETWEEN)

    def _plan_of(self, key: str, patience: timedelta) -> dict[str, Any] | None:
        found = self._operation.read([key], Deadline.after(patience))
        return None if found is None else json.loads(found[0])

    def finish(self) -> None:
        """Waits until all training ranks have finished. Collective over: the training world.

        Raises:
            PhaseTimeoutError: As `part`, for any part.
            CommunicatorError: As `part`.
        """
        self._deadline = self._deadline.plus(_GRACE)
        self._arrive(_END, f"the {self._phase}", range(self._size))
        # All have finished, so nobody reads these keys any more. Nobody waits for the end of the earlier call either.
        self._operation.forget(but=_END)
        self._operation.forget_earlier()

    def _arrive(self, place: str, name: str, ranks: Sequence[int]) -> None:
        self._operation.put(f"at/{self._rank}", json.dumps([place, name, list(ranks)]).encode())
        if self._operation.arrive(place, ranks):
            # Ranks that came earlier may have given up since.
            self._heed_failures()
            self._operation.open(place)
            return
        absent = partial(self._operation.absent, place, ranks)
        self._await(partial(self._is_open, place), absent, part=name, ranks=ranks)

    def _is_open(self, place: str, patience: timedelta) -> bool | None:
        return self._operation.is_open(place, patience) or None

    def _await(
        self, come: Callable[[timedelta], T | None], absent: Callable[[], list[int]], *, part: str, ranks: Sequence[int]
    ) -> T:
        """Waits for a value and returns it. When the time is up, gives up and reports the absent ranks.

        Args:
            come: Waits for the value for a given time; returns None if it has not come.
            absent: Returns the ranks that are not there.
            part: The part of the work, for errors.
            ranks: Training ranks that take part in it.
        """
        while (found := come(self._slice())) is None:
            self._beat()
            self._heed_failures()
            late_s = -self._deadline.left_s
            # If all have come meanwhile, one of them opens the place soon, unless it has died. So wait a moment more.
            if late_s > 0 and (absent() or late_s > _GRACE.total_seconds()):
                self._let_one_judge()
                if (found := come(self._slice())) is not None:
                    break
                self._report_missing(*self._root(part, ranks, absent()))
        return found

    def _root(self, part: str, members: Sequence[int], missing: list[int]) -> tuple[str, Sequence[int], list[int]]:
        """Returns the part for which all ranks wait directly or indirectly, its members, and the ranks missing there.

        A rank that is missing here may wait at another group, for a rank that is missing there. Or it may be inside
        another group's collective, which does not end.
        """
        inside: dict[int, tuple[str, Sequence[int]]] = {}
        seen: set[int] = set()
        while waiting := [rank for rank in missing if rank not in seen]:
            rank = waiting[0]
            seen.add(rank)
            place = json.loads(self._operation.peek(f"at/{rank}") or _BETWEEN)
            if place is None:
                continue
            key, name, ranks = place
            if absent := self._operation.absent(key, ranks):
                part, members, missing = name, ranks, absent
            else:
                inside[rank] = name, ranks
        stuck = [inside[rank] for rank in missing if rank in inside]
        if not stuck or len(stuck) < len(missing):
            return part, members, [rank for rank in missing if rank not in inside]
        name, ranks = stuck[0]
        return name, ranks, self._silent(ranks)

    def _slice(self) -> timedelta:
        """Returns the time until this rank next checks whether another one has given up."""
        return min(_SLICE, max(timedelta(milliseconds=1), timedelta(seconds=self._deadline.left_s)))

    def _run(self, name: str, work: Callable[[], Any], ranks: Sequence[int]) -> Any:
        def attempt() -> tuple[Any, BaseException | None]:
            try:
                return work(), None
            except BaseException as error:
                return None, error

        running = Background(attempt, name=f"{self._phase} {name}")
        try:
            value, error = running.wait(self._deadline, on_tick=self._look, tick_s=_SLICE.total_seconds())
        except DeadlineExceededError:
            self._operation.put(f"elsewhere/{self._rank}", _elsewhere(running.thread).encode())
            self._let_one_judge()
            self._report_missing(name, ranks, self._silent(ranks))
        if error is not None:
            if self._is_deadline(error):
                self._let_one_judge()
                self._report_missing(name, ranks, self._silent(ranks))
            self._report(name, error)
        return value

    def _look(self) -> None:
        self._beat()
        self._heed_failures()

    def _is_deadline(self, error: BaseException) -> bool:
        """Returns True if an error is only a backend's timeout shortly before our deadline; both share one limit."""
        is_timeout = foreign_cause(error) is ForeignCause.TIMEOUT
        return is_timeout and self._deadline.left_s < _SLICE.total_seconds()

    def _beat(self) -> None:
        self._beats += 1
        self._operation.put(f"beat/{self._rank}", str(self._beats).encode())

    def _let_one_judge(self) -> None:
        """Elects the rank that looks up the missing ranks; the others wait for its answer.

        One lookup costs requests in proportion to the ranks. If every rank did it, the cost would grow with their
        square. The others look for themselves if no answer comes.
        """
        if int(self._operation.first("judge", str(self._rank).encode())) != self._rank:
            self._listen(2 * _SLICE + _GRACE)

    def _listen(self, patience: timedelta) -> None:
        """Sends signs of life until another rank gives up or the time has passed."""
        until_s = time.monotonic() + patience.total_seconds()
        while time.monotonic() < until_s:
            self._beat()
            self._heed_failures()
            time.sleep(_BEAT_S)

    def _silent(self, ranks: Sequence[int]) -> list[int]:
        """Returns the members that give no sign of life; if all do, those that have not entered the collective.

        The list is empty if all members are in the collective, and it does not end.
        """
        before = [self._operation.peek(f"beat/{rank}") for rank in ranks]
        self._listen(2 * _SLICE)
        after = [self._operation.peek(f"beat/{rank}") for rank in ranks]
        silent = [rank for rank, a, b in zip(ranks, before, after, strict=True) if a == b]
        return silent or [rank for rank in ranks if self._operation.peek(f"elsewhere/{rank}")]

    def _report_missing(self, name: str, ranks: Sequence[int], missing: Sequence[int]) -> NoReturn:
        places = {rank: self._operation.peek(f"elsewhere/{rank}") for rank in missing[:_NAMED]}
        told = [f"rank {rank} is at {place.decode()}" for rank, place in places.items() if place]
        late = PhaseTimeoutError(
            phase=self._phase,
            awaited=Awaited(name, frozenset(trainer_ids(ranks))),
            missing=trainer_ids(missing),
            waited_s=self._deadline.waited_s,
            setting=timeout_setting(self._phase),
            detail=", ".join(told),
        )
        self._give_up(name, Failure.of(late))

    def _report(self, name: str, error: BaseException) -> NoReturn:
        """Reports an error to all others, unless another rank failed first, which then is the cause of this error."""
        # A broken connection may be the effect of another rank's failure. That rank reports it within a slice.
        if isinstance(error, RuntimeError):
            self._wait_for_the_first()
        self._give_up(name, Failure.of(error), cause=error)

    def _wait_for_the_first(self) -> None:
        until_s = time.monotonic() + _SLICE.total_seconds()
        while time.monotonic() < until_s:
            self._heed_failures()
            time.sleep(_LOOK_S)

    def _give_up(self, part: str, failure: Failure, *, cause: BaseException | None = None) -> NoReturn:
        mine = {"part": part, "rank": self._rank, "failure": failure.as_json()}
        self._raise(json.loads(self._operation.first("failed", json.dumps(mine).encode())), cause=cause)

    def _heed_failures(self) -> None:
        if (told := self._operation.peek("failed")) is not None:
            self._raise(json.loads(told))

    def _raise(self, told: dict[str, Any], *, cause: BaseException | None = None) -> NoReturn:
        rank, failure = told["rank"], Failure.from_json(told["failure"])
        if failure.late is not None:
            raise failure.late
        raise CommunicatorError(
            f"phase {self._phase}: training rank {rank} failed in {told['part']}: {failure.text}",
            culprit=trainer_id(rank),
            foreign=failure.foreign,
        ) from (cause if rank == self._rank else None)
