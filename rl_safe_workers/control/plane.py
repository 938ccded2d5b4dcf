"""The control plane: how the ranks of a world wait for each other and agree, over the run's store, with a deadline.

    barrier             nobody goes on before all have come
    gathering           every rank reports, rank 0 decides, every rank learns of it
    exchange_outcomes   every rank learns which ranks are well, failed or missing
    report_failure      a rank leaves its failure in the store, for the diagnosis
    sign_off            rank 0, which owns the store, stays until nobody needs it any more

It uses no collective and no process group, so no rank can hang in one. Every message is signed; see `board`. If
somebody removes a message, it counts as never sent. An error may then name a rank as missing that has come.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import Store

from rl_safe_workers.control.board import Board
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.failure import Failure, as_ours
from rl_safe_workers.errors import (
    Awaited,
    PhaseTimeoutError,
    RlSafeError,
    RunError,
    StoreLostError,
    first_line,
    in_short,
)
from rl_safe_workers.ranks import RankId, format_ranks
from rl_safe_workers.root_cause import report_from_text, report_of, report_to_text
from rl_safe_workers.setting_names import timeout_setting

logger = logging.getLogger(__name__)

_SHOWN_FAILURES = 8
"""Most different failures that an error lists."""
NO_OUTCOME = "did not report in time"
"""The text in `ControlPlane.exchange_outcomes` for a rank that has not reported its outcome in time."""


class ControlPlane:
    """One rank's place among ``size`` ranks that agree over a store.

    For each name, every rank of the world makes the same calls in the same order. Different names are independent.
    Every method raises StoreLostError if the process that owns the store has ended, and CommunicatorError, naming the
    key, for a message that no rank of this run has signed.

    Attributes:
        store: The store, for torch's own groups.
        world: Name of the world, for keys and errors.
        rank: This process's rank in it.
        members: The ranks of the world, in their order.
    """

    def __init__(self, store: Store, *, world: str, rank: int, members: Sequence[RankId], secret: bytes) -> None:
        """Opens this process's place in the world. Not collective.

        Args:
            store: A store to which every rank is connected. The plane opens a connection of its own.
            world: Name of the world; unique in the run, e.g. ``"training world"``.
            rank: This process's rank in that world; rank 0 decides. A process outside the world, such as the one that
                has started its ranks, passes -1, and may only call `reported_failures`.
            members: The ranks of that world, in their order there.
            secret: The run's secret, 32 bytes.
        """
        self.store, self.world, self.rank, self.members = store, world, rank, tuple(members)
        self._board = Board(store, secret=secret, who=f"rank {rank} of {world}")
        self._scope = world

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    def of_world(self, world: str, *, rank: int, members: Sequence[RankId]) -> ControlPlane:
        """Returns this process's place in another world of the run. Not collective."""
        other = ControlPlane.__new__(ControlPlane)
        other.store, other.world, other.rank, other.members = self.store, world, rank, tuple(members)
        other._board, other._scope = self._board.of(f"rank {rank} of {world}"), world
        return other

    def scope(self, name: str) -> ControlPlane:
        """Returns a control plane of the same ranks, whose operations have separate names. Not collective."""
        other = self.of_world(self.world, rank=self.rank, members=self.members)
        other._scope = f"{self._scope}/{name}"
        return other

    def begin(self, name: str, *, phase: str) -> Operation:
        """Begins an operation of several steps. Not collective; every rank begins it.

        Args:
            name: Name of the operation, e.g. ``"save"``.
            phase: The phase whose deadline counts, for errors.

        Raises:
            ValueError: In a process outside the world.
        """
        self._check_inside()
        self._board.phase = phase
        full = f"{self._scope}/{name}"
        number = self._board.number(full, self.rank)
        return Operation(self._board, full, number, phase=phase, world=self.world, rank=self.rank, members=self.members)

    def barrier(self, phase: str, deadline: Deadline) -> None:
        """Waits for all others. Collective over: every rank of the world.

        Args:
            phase: The phase, for errors. Barriers of each phase are counted separately.
            deadline: Longest wait.

        Raises:
            PhaseTimeoutError: If not all ranks have come in time; names those missing.
        """
        operation = self.begin(f"barrier/{phase}", phase=phase)
        operation.meet("all", range(self.size), deadline)
        operation.forget_earlier()

    def gathering(self, name: str, *, phase: str) -> Gathering:
        """Begins an operation of one step, in which every rank reports and rank 0 decides. As `begin`."""
        return self.begin(name, phase=phase).gathering("decision")

    def exchange_outcomes(self, failure: str | None, *, phase: str, deadline: Deadline) -> dict[int, str]:
        """Tells the others whether this rank is well, and learns which ranks are not.

        Collective over: every rank of the world. It returns when the time is up, even if ranks are missing.

        Args:
            failure: None if this rank is well, else its failure in one line.
            phase: The phase, for errors.
            deadline: Longest wait for all outcomes.

        Returns:
            Failure by rank; empty if every rank is well. A rank without an outcome in time counts as failed. So does
            rank 0 if its store is gone.
        """
        try:
            operation = self.begin("outcomes", phase=phase)
            outcomes = operation.exchange("given", failure or "", deadline)
        except StoreLostError:
            return {0: "has ended, and the run's store with it"}
        return {rank: outcome for rank, outcome in outcomes.items() if outcome}

    def sign_off(self, phase: str, deadline: Deadline) -> None:
        """Says that this rank no longer needs the store. Only rank 0, its owner, waits for all others.

        A `barrier` is not enough: rank 0 could end its process, and the store with it, before the others get an answer.

        Args:
            phase: The phase, for errors.
            deadline: Longest wait of rank 0.

        Raises:
            PhaseTimeoutError: On rank 0, if not all others have signed off in time; names those missing.
        """
        operation = self.begin("signed_off", phase=phase)
        if self.rank != 0:
            operation.put(str(self.rank), b"")
            return
        others = [str(rank) for rank in range(1, self.size)]
        if others and operation.read(others, deadline) is None:
            missing = [rank for rank in range(1, self.size) if operation.peek(str(rank)) is None]
            raise operation.late(missing, deadline)

    def report_failure(self, error: Exception, *, phase: str) -> None:
        """Writes this rank's failure to the store, for the search for the root cause. Does not wait.

        If the store is gone too, it only logs that, because the caller has an error to raise.

        Args:
            error: The error that this rank caught.
            phase: The phase in which it was raised.

        Raises:
            ValueError: In a process outside the world.
        """
        self._check_inside()
        report = report_of(error, self.members[self.rank], phase)
        self._board.phase = phase
        try:
            self._board.put(self._failure_key(self.rank), report_to_text(report).encode())
        except StoreLostError as lost:
            logger.warning("%s; the other ranks are not told of this failure: %s", lost, first_line(error))

    def reported_failures(self) -> dict[RankId, RunError]:
        """Returns the failures that ranks have reported. Not collective.

        It waits for no rank, but hangs if the store's owner is stopped: give it a deadline (`run_bounded`).

        Returns:
            By rank, as `root_cause.root_cause` takes it; empty if no rank has reported any.
        """
        found: dict[RankId, RunError] = {}
        for rank, rank_id in enumerate(self.members):
            if (message := self._board.peek(self._failure_key(rank))) is not None:
                found[rank_id] = report_from_text(message)
        return found

    def _check_inside(self) -> None:
        if self.rank < 0:
            raise ValueError(f"a process outside of {self.world} takes no part in what its ranks do")

    def _failure_key(self, rank: int) -> str:
        return f"{self._scope}/failure/{rank}"

    def mailbox(self, name: str) -> Mailbox:
        """Returns a mailbox for messages between two ranks. Its name is unique in the run. Not collective."""
        return Mailbox(self._board, f"{self._scope}/{name}")


class Operation:
    """One numbered operation. Its keys are deleted at the end of a later operation with the same name.

    A *place* is a named point of an operation, at which some ranks wait for each other. A rank that comes to a place
    notes that in the store. The rank that sees that all have come opens the place, and all go on.
    """

    def __init__(
        self, board: Board, name: str, number: int, *, phase: str, world: str, rank: int, members: Sequence[RankId]
    ) -> None:
        """Made by `ControlPlane.begin`."""
        self._board, self._name, self._number = board, name, number
        self.phase, self.world, self.rank, self.members, self.size = phase, world, rank, members, len(members)

    def gathering(self, step: str) -> Gathering:
        """Returns a step in which every rank reports and rank 0 decides."""
        return Gathering(self, step)

    def put(self, key: str, contents: bytes) -> None:
        """Writes a message, which this rank deletes later."""
        self._board.put(self._keep(key), contents)

    def peek(self, key: str) -> bytes | None:
        """Returns a message; None if there is none. Does not wait."""
        return self._board.peek(self._key(key))

    def has(self, keys: Sequence[str]) -> bool:
        """Checks whether there is something under every key, signed or not. Does not wait."""
        return self._board.has([self._key(key) for key in keys])

    def read(self, keys: Sequence[str], deadline: Deadline) -> list[bytes] | None:
        """Waits for messages; returns them, or None if one is missing when the time is up."""
        return self._board.read([self._key(key) for key in keys], deadline.remaining())

    def first(self, key: str, contents: bytes) -> bytes:
        """Writes a message unless another rank has; returns the message that is then there."""
        return self._board.first(self._keep(key), contents)

    def come(self, place: str, ranks: Sequence[int], text: str = "") -> None:
        """Says that this rank, one of ``ranks``, has come to a place. Does not wait."""
        log = f"{place}/came"
        self._board.note(self._keep(log) if self.rank == min(ranks) else self._key(log), self.rank, text)

    def arrive(self, place: str, ranks: Sequence[int], text: str = "") -> bool:
        """As `come`, and returns True if all of ``ranks`` have come. A rank that gets True must call `open`."""
        self.come(place, ranks, text)
        found, _ = self._board.notes(self._key(f"{place}/came"), at_least=len(ranks))
        return found.keys() >= set(ranks)

    def open(self, place: str) -> None:
        """Lets the ranks that wait at a place go on."""
        self.put(f"{place}/open", b"")

    def is_open(self, place: str, timeout: timedelta) -> bool:
        """Waits until a place is open; returns False when the time is up."""
        key = self._key(f"{place}/open")
        return self._board.wait([key], timeout) and self._board.peek(key) is not None

    def absent(self, place: str, ranks: Sequence[int]) -> list[int]:
        """Returns the members of ``ranks`` that have not come to a place. Does not wait."""
        found, _ = self._board.notes(self._key(f"{place}/came"))
        return [rank for rank in ranks if rank not in found]

    def meet(self, place: str, ranks: Sequence[int], deadline: Deadline) -> None:
        """Waits at a place for others. Collective over: ``ranks``.

        Raises:
            PhaseTimeoutError: If not all have come in time; names those missing.
        """
        if self.arrive(place, ranks):
            self.open(place)
            return
        while not self.is_open(place, deadline.remaining()):
            # Somebody may have removed the key that wakes this rank. If all have come, go on anyway.
            if not (missing := self.absent(place, ranks)):
                return
            if deadline.expired:
                raise self.late(missing, deadline, place=place)

    def exchange(self, place: str, text: str, deadline: Deadline) -> dict[int, str]:
        """Publishes this rank's text and waits for the texts of all others. Collective over: every rank of the world.

        Returns:
            Text by rank; `NO_OUTCOME` for a rank that has given none in time.
        """
        if self.arrive(place, range(self.size), text):
            self.open(place)
        while not self.is_open(place, deadline.remaining()) and not deadline.expired:
            if not self.absent(place, range(self.size)):
                break
        found, _ = self._board.notes(self._key(f"{place}/came"))
        if len(found) < self.size:
            silent = format_ranks(set(range(self.size)) - found.keys())
            logger.info("phase %s: rank %s of %s has not answered within the timeout", self.phase, silent, self.world)
        else:
            self.forget_earlier()
        return dict.fromkeys(range(self.size), NO_OUTCOME) | found

    def late(
        self, missing: Sequence[int], deadline: Deadline, *, place: str | None = None, key: str | None = None
    ) -> PhaseTimeoutError:
        """Returns the error of a wait for ranks that have not come.

        Args:
            missing: The ranks that have not come.
            deadline: The deadline that has passed.
            place: The place that this rank has reached. If a stranger has written there, the error says so.
            key: The key for which the ranks still wait if all have come; for the error.
        """
        detail = "" if key is None else f"all have come, and nothing is under key {self._key(key)!r} of the run's store"
        if place is not None:
            log = self._key(f"{place}/came")
            found, is_forged = self._board.notes(log)
            if is_forged or self.rank not in found:
                what = "holds what no rank of this run has signed" if is_forged else "has lost what this rank wrote"
                detail = f"key {log!r} of the run's store {what}: another process writes to the store"
        return PhaseTimeoutError(
            phase=self.phase,
            awaited=Awaited(self.world, frozenset(self.members)),
            missing=[self.members[rank] for rank in missing],
            waited_s=deadline.waited_s,
            setting=timeout_setting(self.phase),
            detail=detail,
        )

    def forget(self, *, but: str) -> None:
        """Deletes this rank's messages except those of a place. Call it once no rank waits at another place."""
        self._board.forget(self._name, before=self._number + 1, but=self._key(f"{but}/"))

    def forget_earlier(self) -> None:
        """Deletes this rank's messages of earlier operations with the name. Call it once all have begun this one."""
        self._board.forget(self._name, before=self._number)

    def _key(self, key: str) -> str:
        return self._board.key(self._name, self._number, key)

    def _keep(self, key: str) -> str:
        return self._board.keep(self._name, self._number, key)


class Report(NamedTuple):
    """The report of one rank, or the decision of rank 0."""

    failure: Failure | None
    value: Any
    """Fit for JSON."""

    def to_bytes(self) -> bytes:
        """Returns it as JSON."""
        return json.dumps([None if self.failure is None else self.failure.as_json(), self.value]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Report:
        """Rebuilds a report from the result of `to_bytes`."""
        failure, value = json.loads(data)
        return cls(None if failure is None else Failure.from_json(failure), value)


class Gathering:
    """Every rank reports, rank 0 decides, and every rank gets the decision. `settle` does these steps in one call."""

    def __init__(self, operation: Operation, step: str) -> None:
        """Made by `Operation.gathering`."""
        self._operation, self._step = operation, step
        self._reports = [f"{step}/report/{rank}" for rank in range(operation.size)]
        self._decision = f"{step}/decision"
        self._concluded: bytes | None = None
        """The decision as this rank has published it; None before."""

    def report(self, value: Any = None, *, failure: Failure | None = None) -> None:
        """Publishes or replaces this rank's report. Does not wait."""
        operation = self._operation
        operation.put(self._reports[operation.rank], Report(failure, value).to_bytes())
        operation.come(self._step, range(operation.size))

    def all_reported(self) -> bool:
        """Checks whether every rank has reported. Does not wait."""
        return self._operation.has(self._reports)

    def reports(self, deadline: Deadline) -> list[Report]:
        """Waits for every rank's report; returns them by rank. Rank 0 calls it.

        Raises:
            PhaseTimeoutError: If some are missing when the time is up; names the ranks.
        """
        messages = self._operation.read(self._reports, deadline)
        if messages is None:
            raise self._late(deadline)
        return [Report.from_bytes(message) for message in messages]

    def values(self, deadline: Deadline) -> list[Any]:
        """Waits for every rank's report; returns the values by rank. Rank 0 calls it.

        Raises:
            PhaseTimeoutError: As `reports`.
            RlSafeError: If a rank has failed. It has the class of the first failure and the texts of all.
        """
        reports = self.reports(deadline)
        failures = {rank: report.failure for rank, report in enumerate(reports) if report.failure is not None}
        if failures:
            members = self._operation.members
            text = _failures_in_short({rank: failure.text for rank, failure in failures.items()})
            first = next(iter(failures.values()))
            # A rank that failed only because of another rank's failure is not the culprit.
            culprits = [failure.by(members[rank]).culprit for rank, failure in failures.items()]
            culprit = min((one for one in culprits if one is not None), default=members[min(failures)])
            raise replace(first, text=text, culprit=culprit, late=None).error()
        return [report.value for report in reports]

    def conclude(self, value: Any = None, *, failure: Failure | None = None) -> None:
        """Publishes the decision. Rank 0 calls it; a second call changes nothing."""
        if self._concluded is None:
            self._concluded = Report(failure, value).to_bytes()
            self._operation.put(self._decision, self._concluded)

    def decision(self) -> Report | None:
        """Returns the decision; None if there is none yet. Does not wait."""
        message = self._operation.peek(self._decision)
        return None if message is None else self._decided(message)

    def await_decision(self, deadline: Deadline) -> Report:
        """Waits for the decision.

        Raises:
            PhaseTimeoutError: If there is none when the time is up; names the ranks that have not reported, or rank 0.
        """
        if self._concluded is not None:
            return self._decided(self._concluded)
        messages = self._operation.read([self._decision], deadline)
        if messages is None:
            raise self._late(deadline)
        return self._decided(messages[0])

    def settle(
        self,
        deadline: Deadline,
        *,
        failure: Exception | None = None,
        report: Any = None,
        decide: Callable[[Sequence[Any]], Any] = lambda reports: None,
        foreign: type[RlSafeError] = RunError,
    ) -> Any:
        """Reports, lets rank 0 decide, and returns its decision. Raises on every rank if one has failed.

        Collective over: every rank of the world.

        Args:
            deadline: Longest wait, for the reports and for the decision.
            failure: This rank's failure; None if it is well.
            report: This rank's report to rank 0; fit for JSON.
            decide: Called on rank 0 with every rank's report if all are well. Its value must be fit for JSON.
            foreign: The class that replaces an error that is not one of this package, on every rank.

        Raises:
            RlSafeError: On the rank with a ``failure``, that failure as one of our errors. On the others, the same kind
                of error, which names that rank. Also if ``decide`` raises.
            PhaseTimeoutError: On every rank, if some do not report in time; names them.
        """
        self.report(report, failure=None if failure is None else Failure.of(failure, otherwise=foreign))
        if self._operation.rank == 0:
            self.decide(deadline, decide, foreign=foreign)
        decision = self.await_decision(deadline)
        if isinstance(failure, RlSafeError):
            raise failure
        if failure is not None:
            raise as_ours(failure, foreign) from failure
        if decision.failure is not None:
            raise decision.failure.error()
        return decision.value

    def decide(
        self, deadline: Deadline, decide: Callable[[Sequence[Any]], Any], *, foreign: type[RlSafeError] = RunError
    ) -> None:
        """Waits for all reports, decides, and publishes the decision or the failure. Rank 0 calls it."""
        value, failure = None, None
        try:
            values = self.values(deadline)
        except StoreLostError:
            raise
        except RlSafeError as error:
            failure = Failure.of(error)
        else:
            try:
                value = decide(values)
            except Exception as error:
                failure = Failure.of(error, otherwise=foreign).by(self._operation.members[0])
        self.conclude(value, failure=failure)

    def _decided(self, message: bytes) -> Report:
        # Rank 0 has read every report: all have begun this operation.
        self._operation.forget_earlier()
        return Report.from_bytes(message)

    def _late(self, deadline: Deadline) -> PhaseTimeoutError:
        missing = self._operation.absent(self._step, range(self._operation.size))
        if missing:
            return self._operation.late(missing, deadline, place=self._step)
        return self._operation.late([0], deadline, key=self._decision)


def _failures_in_short(failures: Mapping[int, str]) -> str:
    """Returns the failures of training ranks, the same one once. If all ranks fail, every rank gets this text."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks_by_text.setdefault(text, []).append(rank)
    sentences = [f"training rank {format_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
    return in_short(sentences, shown=_SHOWN_FAILURES)


class Mailbox:
    """Messages from one rank to one other rank."""

    def __init__(self, board: Board, name: str) -> None:
        """Made by `ControlPlane.mailbox`."""
        self._board, self._name = board, name

    def signature(self, text: str) -> bytes:
        """Returns bytes that only ranks of the run can make, from a text and the mailbox's name."""
        return self._board.signature(f"{self._name}/{text}")

    def leave(self, key: str, contents: bytes = b"") -> None:
        """Writes a message. Does not wait."""
        self._board.put(f"{self._name}/{key}", contents)

    def take(self, key: str, deadline: Deadline) -> bytes | None:
        """Waits for a message and removes it; None if there is none when the time is up."""
        full = f"{self._name}/{key}"
        messages = self._board.read([full], deadline.remaining())
        if messages is None:
            return None
        self._board.delete([full])
        return messages[0]
