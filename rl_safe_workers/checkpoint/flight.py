"""A save in flight: from the moment that a rank begins to write to that at which all know how it ended.

written     each rank has its file, or what kept it from that, and reports it
committed   rank 0 has made a checkpoint of all files, and decides
concluded   every rank has read the decision
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rl_safe_workers.checkpoint.writer import WrittenFile
from rl_safe_workers.errors import CheckpointError, PhaseTimeoutError, RlSafeError
from rl_safe_workers.foreign_errors import ForeignCause, classify
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.worlds.agreement import Agreement

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a rank wrote. The commit gets one from every rank."""

    file: WrittenFile | None
    """None if it had nothing to write."""
    blobs: list[int]
    """Which blob at the end of the file belongs to each object of the catalogue."""
    note: str
    """Anything that the caller wants to tell the commit."""


class Outcome(NamedTuple):
    """What a rank reports of its writing, and rank 0 decides upon the whole."""

    failure: str
    """Empty if all is well."""
    value: Any
    """Fit for JSON."""
    culprit: int | None = None
    """The training rank that has failed; None if ranks are missing."""
    late: dict[str, Any] | None = None
    """What `PhaseTimeoutError.as_json` has returned, if that is the failure."""


class Flight:
    """One rank's part in a save in flight; `finish` or `poll` ends it."""

    def __init__(
        self, agreement: Agreement, directory: Path, *, rank: int, commit: Callable[[Sequence[Written]], Any]
    ) -> None:
        """Begins a flight; `write` must follow.

        Args:
            agreement: On what every rank has written.
            directory: Where, for errors.
            rank: This process's rank; 0 commits.
            commit: Called on rank 0 with what every rank has written. Its value must be fit for JSON.
        """
        self._agreement, self._directory, self._rank, self._commit = agreement, directory, rank, commit
        self._written: Future[Written] = Future()
        self._committed: Future[Any] | None = None
        self._is_reported = self._is_logged = False
        self._threads: list[threading.Thread] = []

    def write(self, work: Callable[[], Written], *, background: bool) -> None:
        """Writes, here or on a thread. What fails is kept until the end of the flight."""
        (self._in_thread if background else _fulfil)(work, self._written)

    def advance(self) -> None:
        """Moves on without waiting. Not collective.

        Raises:
            CommunicatorError: If the run's store is gone.
        """
        if not self._written.done():
            return
        self._report()
        if self._rank == 0 and self._committed is None and self._agreement.all_reported():
            reports = self._agreement.reports(timedelta(seconds=1))
            self._committed = Future()
            self._in_thread(lambda: self._commit_all(reports), self._committed)
        if self._committed is not None and self._committed.done():
            self._decide()

    def poll(self) -> Outcome | None:
        """Moves on without waiting; returns the outcome if there is one: what failed, or else the commit's value."""
        self.advance()
        if not self._is_reported or not self._agreement.decided():
            return None
        outcome = Outcome(*json.loads(self._agreement.decision(timedelta(seconds=1))))
        if outcome.failure and not self._is_logged:
            logger.error("the save of %s has failed: %s", self._directory.parent, outcome.failure)
            self._is_logged = True
        self._join()
        return outcome

    def finish(self, timeout: timedelta) -> Outcome:
        """Waits for the outcome.

        Raises:
            CheckpointError: If this rank has not written, or rank 0 not committed, when the time is up.
            PhaseTimeoutError: Naming the ranks that had not written in time.
            CommunicatorError: If the run's store is gone.
        """
        deadline_s = time.monotonic() + timeout.total_seconds()
        self._wait(self._written, timeout, "written")
        self._report()
        if self._rank == 0:
            if self._committed is None:
                self._committed = Future()
                _fulfil(lambda: self._commit_all(self._agreement.reports(_left(deadline_s))), self._committed)
            self._wait(self._committed, _left(deadline_s), "committed")
            self._decide()
        outcome = Outcome(*json.loads(self._agreement.decision(_left(deadline_s))))
        self._join()
        return outcome

    def abandon(self, reason: str) -> None:
        """Tells the others that this rank gives up, whose `finish` then fails as soon as it can. Does not wait.

        What this rank is writing is left behind.

        Raises:
            CommunicatorError: If the run's store is gone.
        """
        # Instead of what it may have reported before: rank 0 commits nothing that a rank has given up.
        self._agreement.report(json.dumps(Outcome(reason, None, self._rank)).encode())
        if self._rank == 0 and not self._agreement.decided():
            self._agreement.decide(json.dumps(Outcome(f"training rank 0: {reason}", None, 0)).encode())

    def conclude(self, outcome: Outcome) -> Any:
        """Returns the commit's value.

        Raises:
            CheckpointError: If the save has failed, on this rank or on another.
            PhaseTimeoutError: On every rank, if some had not written in time.
        """
        own = self._written.exception()
        if own is None and self._committed is not None:
            own = self._committed.exception()
        if outcome.late is not None:
            raise PhaseTimeoutError.from_json(outcome.late) from own
        if outcome.failure:
            text = f"save of {self._directory.parent} failed: {outcome.failure}"
            culprit = None if outcome.culprit is None else trainer_id(outcome.culprit)
            raise CheckpointError(text, culprit=culprit) from own
        return outcome.value

    def _in_thread(self, work: Callable[[], Any], future: Future[Any]) -> None:
        # A daemon: an exit does not wait for a save that nobody finished.
        thread = threading.Thread(target=_fulfil, args=(work, future), name="checkpoint", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _join(self) -> None:
        """Waits for threads that have done their work: at the end of a flight nothing of it is left."""
        for thread in self._threads:
            thread.join()

    def _wait(self, done: Future[Any], timeout: timedelta, what: str) -> None:
        try:
            done.exception(timeout.total_seconds())
        except TimeoutError:
            self.abandon(f"not {what} within {timeout.total_seconds():.1f} s")
            raise CheckpointError(
                f"training rank {self._rank} has not {what} {self._directory} within {timeout.total_seconds():.1f} s: "
                "to wait longer raise rl_safe.timeouts.save"
            ) from None

    def _report(self) -> None:
        if not self._is_reported:
            outcome = _outcome(self._written, self._rank, asdict)
            if outcome.failure:
                logger.error("training rank %d could not write %s: %s", self._rank, self._directory, outcome.failure)
            self._agreement.report(json.dumps(outcome).encode())
            self._is_reported = True

    def _decide(self) -> None:
        if self._committed is not None and not self._agreement.decided():
            self._agreement.decide(json.dumps(_outcome(self._committed, self._rank)).encode())

    def _commit_all(self, reports: Sequence[bytes]) -> Any:
        outcomes = [Outcome(*json.loads(report)) for report in reports]
        failed = {rank: outcome.failure for rank, outcome in enumerate(outcomes) if outcome.failure}
        if failed:
            text = "; ".join(f"training rank {rank}: {failure}" for rank, failure in failed.items())
            # One that has failed with what it heard of another is no culprit.
            heard_of = [culprit for rank in failed if (culprit := outcomes[rank].culprit) is not None]
            raise CheckpointError(text, culprit=trainer_id(min(heard_of or failed)))
        return self._commit([_to_written(outcome.value) for outcome in outcomes])


def _to_written(fields: Mapping[str, Any]) -> Written:
    file = None if fields["file"] is None else WrittenFile(**fields["file"])
    return Written(file=file, blobs=fields["blobs"], note=fields["note"])


def _left(deadline_s: float) -> timedelta:
    """Time until a moment of the monotonic clock; a tenth of a second if it has passed, for what needs no wait."""
    return timedelta(seconds=max(0.1, deadline_s - time.monotonic()))


def _outcome(done: Future[T], rank: int, to_json: Callable[[T], Any] = lambda value: value) -> Outcome:
    error = done.exception()
    if error is None:
        return Outcome("", to_json(done.result()))
    if isinstance(error, PhaseTimeoutError):
        return Outcome(str(error), None, late=error.as_json())
    if isinstance(error, RlSafeError):
        return Outcome(str(error), None, rank if error.culprit is None else error.culprit.rank)
    advice = ": make room there" if classify(error) is ForeignCause.NO_SPACE else ""
    return Outcome(f"{type(error).__name__}: {error}{advice}", None, rank)


def _fulfil(work: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
