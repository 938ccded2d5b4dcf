"""A save in flight: from the moment that a rank begins to write to that at which all know how it ended.

written     each rank has its file, or what kept it from that, and reports it
committed   rank 0 has made a checkpoint of all files, and decides
concluded   every rank has read the decision
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rl_safe_workers.checkpoint.writer import WrittenFile
from rl_safe_workers.control.deadline import Background, Deadline
from rl_safe_workers.control.failure import ReportedFailure
from rl_safe_workers.control.plane import Gathering, Report
from rl_safe_workers.errors import CheckpointError, StoreLostError
from rl_safe_workers.foreign_errors import ForeignCause, classify
from rl_safe_workers.ranks import trainer_id

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a rank wrote. The commit gets one from every rank."""

    file: WrittenFile | None
    """None if it had nothing to write."""
    blobs: list[int]
    """Which blob at the end of the file belongs to each object of the catalogue."""
    note: str
    """Anything that the caller wants to tell the commit."""


class Flight:
    """One rank's part in a save in flight; `finish` or `poll` ends it."""

    def __init__(
        self, gathering: Gathering, directory: Path, *, rank: int, commit: Callable[[Sequence[Written]], Any]
    ) -> None:
        """Begins a flight; `write` must follow.

        Args:
            gathering: Of what every rank has written.
            directory: Where, for errors.
            rank: This process's rank; 0 commits.
            commit: Called on rank 0 with what every rank has written. Its value must be fit for JSON.
        """
        self._gathering, self._directory, self._rank, self._commit = gathering, directory, rank, commit
        self._writing: Background[Written] | None = None
        self._committing: Background[Any] | None = None
        self._error: Exception | None = None
        """This rank's own failure."""
        self._is_reported = self._is_logged = False

    def write(self, work: Callable[[], Written], *, background: bool) -> None:
        """Writes, here or on a thread. What fails is kept until the end of the flight.

        Raises:
            StoreLostError: If the run's store is gone.
        """
        if background:
            self._writing = Background(work, name="checkpoint")
        else:
            self._report(work)

    def advance(self) -> None:
        """Moves on without waiting. Not collective.

        Raises:
            StoreLostError: If the run's store is gone.
        """
        if self._writing is not None and not self._writing.is_done:
            return
        self._report_written()
        if self._rank == 0 and self._committing is None and self._gathering.all_reported():
            self._committing = Background(
                partial(self._commit_all, self._reports(Deadline.after(1))), name="checkpoint"
            )
        if self._committing is not None and self._committing.is_done:
            self._decide(partial(self._committing.wait, Deadline.after(0)))

    def poll(self) -> Report | None:
        """Moves on without waiting; returns rank 0's decision, with the commit's value, if there is one."""
        self.advance()
        decision = self._gathering.decision() if self._is_reported else None
        if decision is not None and decision.failure is not None and not self._is_logged:
            logger.error("the save of %s has failed: %s", self._directory.parent, decision.failure.text)
            self._is_logged = True
        return decision

    def finish(self, timeout: timedelta) -> Report:
        """Waits for rank 0's decision.

        Raises:
            CheckpointError: If this rank has not written, or rank 0 not committed, when the time is up.
            PhaseTimeoutError: Naming the ranks that had not written in time.
            StoreLostError: If the run's store is gone.
        """
        deadline = Deadline.after(timeout)
        self._wait(self._writing, deadline, timeout, "written")
        self._report_written()
        if self._rank == 0:
            self._wait(self._committing, deadline, timeout, "committed")
            if self._committing is None:
                self._decide(lambda: self._commit_all(self._reports(deadline)))
            else:
                self._decide(partial(self._committing.wait, deadline))
        return self._gathering.await_decision(deadline)

    def abandon(self, reason: str) -> None:
        """Tells the others that this rank gives up, whose `finish` then fails as soon as it can. Does not wait.

        What this rank is writing is left behind.

        Raises:
            StoreLostError: If the run's store is gone.
        """
        failure = ReportedFailure(kind=CheckpointError.__name__, text=reason, culprit=trainer_id(self._rank))
        # Instead of what it may have reported before: rank 0 commits nothing that a rank has given up.
        self._gathering.report(failure=failure)
        if self._rank == 0:
            self._gathering.conclude(failure=replace(failure, text=f"training rank 0: {reason}"))

    def conclude(self, decision: Report) -> Any:
        """Returns the commit's value.

        Raises:
            CheckpointError: If the save has failed, on this rank or on another.
            PhaseTimeoutError: On every rank, if some had not written in time.
        """
        failure = decision.failure
        if failure is None:
            return decision.value
        if failure.late is not None:
            raise failure.error() from self._error
        text = f"save of {self._directory.parent} failed: {failure.text}"
        raise CheckpointError(text, culprit=failure.culprit) from self._error

    def _wait(self, work: Background[Any] | None, deadline: Deadline, timeout: timedelta, what: str) -> None:
        if work is not None and not work.ends(deadline):
            self.abandon(f"not {what} within {timeout.total_seconds():.1f} s")
            raise CheckpointError(
                f"training rank {self._rank} has not {what} {self._directory} within {timeout.total_seconds():.1f} s: "
                "to wait longer raise rl_safe.timeouts.save"
            )

    def _report_written(self) -> None:
        """Reports what the thread has written, once."""
        if self._writing is not None and not self._is_reported:
            self._report(partial(self._writing.wait, Deadline.after(0)))

    def _report(self, written: Callable[[], Written]) -> None:
        value = failure = None
        try:
            value = asdict(written())
        except Exception as error:
            failure = self._failed(error)
            logger.error("training rank %d could not write %s: %s", self._rank, self._directory, failure.text)
        self._gathering.report(value, failure=failure)
        self._is_reported = True

    def _decide(self, committed: Callable[[], Any]) -> None:
        value = failure = None
        try:
            value = committed()
        except StoreLostError:
            raise
        except Exception as error:
            failure = self._failed(error).by(trainer_id(self._rank))
        self._gathering.conclude(value, failure=failure)

    def _failed(self, error: Exception) -> ReportedFailure:
        self._error = self._error or error
        failure = ReportedFailure.of(error, foreign=CheckpointError)
        is_full = classify(error) is ForeignCause.NO_SPACE
        return replace(failure, text=f"{failure.text}: make room there") if is_full else failure

    def _reports(self, deadline: Deadline) -> list[Any] | Exception:
        """Returns what every rank has written, or what keeps the save from being committed."""
        try:
            return self._gathering.values(deadline)
        except StoreLostError:
            raise
        except Exception as error:
            return error

    def _commit_all(self, reports: list[Any] | Exception) -> Any:
        if isinstance(reports, Exception):
            raise reports
        return self._commit([_to_written(report) for report in reports])


def _to_written(fields: Mapping[str, Any]) -> Written:
    file = None if fields["file"] is None else WrittenFile(**fields["file"])
    return Written(file=file, blobs=fields["blobs"], note=fields["note"])
