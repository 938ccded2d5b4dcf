"""A decision in the background: each rank does its part, perhaps on a thread, and goes on meanwhile.

reported    each rank has done its part or failed, and reports that
decided     rank 0 has all reports, and decides
concluded   every rank has read the decision
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rl_safe_workers.control.deadline import Background, Deadline
from rl_safe_workers.control.failure import Failure
from rl_safe_workers.control.plane import Gathering, Report
from rl_safe_workers.errors import RlSafeError, StoreLostError
from rl_safe_workers.foreign_errors import ForeignCause, classify
from rl_safe_workers.ranks import RankId

logger = logging.getLogger(__name__)


class PendingDecision:
    """One rank's part in a decision. `start` begins it; `finish` or `poll` ends it."""

    def __init__(
        self,
        gathering: Gathering,
        *,
        rank_id: RankId,
        subject: str,
        setting: str,
        error: type[RlSafeError],
        decide: Callable[[Sequence[Any]], Any],
    ) -> None:
        """Begins nothing yet.

        Args:
            gathering: Collects the ranks' reports.
            rank_id: This process. The rank with number 0 decides.
            subject: Subject of the decision, for errors, e.g. ``"save of /checkpoints/global_step_5"``.
            setting: The setting to raise if the time is too short, for errors.
            error: The class for failures that are not errors of this package.
            decide: Called on rank 0, perhaps on a thread, with every rank's report. Its value must be fit for JSON.
        """
        self._gathering, self._rank_id = gathering, rank_id
        self._subject, self._setting, self._error_class, self._decide_from = subject, setting, error, decide
        self._working: Background[Any] | None = None
        self._deciding: Background[Any] | None = None
        self._error: Exception | None = None
        """This rank's own failure."""
        self._is_reported = self._is_logged = False

    def start(self, work: Callable[[], Any], *, background: bool) -> None:
        """Does this rank's part, here or on a thread. Keeps a failure until the end instead of raising it.

        Args:
            work: Its value is this rank's report, and must be fit for JSON.
            background: Whether to do it on a thread.

        Raises:
            StoreLostError: If the run's store is gone.
        """
        if background:
            self._working = Background(work, name="pending")
        else:
            self._report(work)

    def advance(self) -> None:
        """Moves on without waiting. Not collective.

        Raises:
            StoreLostError: If the run's store is gone.
        """
        if self._working is not None and not self._working.is_done:
            return
        self._report_once()
        if self._decides and self._deciding is None and self._gathering.all_reported():
            reports = self._reports(Deadline.after(1))
            self._deciding = Background(partial(self._decided, reports), name="pending")
        if self._deciding is not None and self._deciding.is_done:
            self._conclude(partial(self._deciding.wait, Deadline.after(0)))

    def poll(self) -> Report | None:
        """Moves on without waiting; returns rank 0's decision, if there is one."""
        self.advance()
        decision = self._gathering.decision() if self._is_reported else None
        if decision is not None and decision.failure is not None and not self._is_logged:
            logger.error("the %s has failed: %s", self._subject, decision.failure.text)
            self._is_logged = True
        return decision

    def finish(self, deadline: Deadline) -> Any:
        """Waits for rank 0's decision and returns its value.

        Raises:
            RlSafeError: On every rank, if a rank has failed, in the class given to the constructor. Also if, when the
                time is up, this rank has not done its part or rank 0 has not decided.
            PhaseTimeoutError: On every rank, naming the ranks that had not reported in time.
            StoreLostError: If the run's store is gone.
        """
        self._await(self._working, deadline, "done its part of")
        self._report_once()
        if self._decides:
            self._await(self._deciding, deadline, "decided")
            if self._deciding is None:
                self._conclude(lambda: self._decided(self._reports(deadline)))
            else:
                self._conclude(partial(self._deciding.wait, deadline))
        return self._value(self._gathering.await_decision(deadline))

    def abandon(self, reason: str) -> None:
        """Tells the others that this rank gives up, so that their `finish` fails soon. Does not wait.

        A thread that does this rank's part goes on alone.

        Raises:
            StoreLostError: If the run's store is gone.
        """
        failure = Failure(reason, kind=self._error_class.__name__, culprit=self._rank_id)
        # This replaces an earlier report, because rank 0 must not decide if a rank has given up.
        self._gathering.report(failure=failure)
        if self._decides:
            self._gathering.conclude(failure=replace(failure, text=f"training rank 0: {reason}"))

    @property
    def _decides(self) -> bool:
        return self._rank_id.rank == 0

    def _value(self, decision: Report) -> Any:
        failure = decision.failure
        if failure is None:
            return decision.value
        if failure.late is not None:
            raise failure.error() from self._error
        error = self._error_class(f"{self._subject} failed: {failure.text}")
        if failure.culprit is not None:
            error.culprit = failure.culprit
        raise error from self._error

    def _await(self, work: Background[Any] | None, deadline: Deadline, what: str) -> None:
        if work is not None and not work.ends(deadline):
            late = f"has not {what} the {self._subject} within {deadline.waited_s:.1f} s"
            self.abandon(late)
            raise self._error_class(f"training rank {self._rank_id.rank} {late}: to wait longer raise {self._setting}")

    def _report_once(self) -> None:
        """Reports the thread's result, once."""
        if self._working is not None and not self._is_reported:
            self._report(partial(self._working.wait, Deadline.after(0)))

    def _report(self, work: Callable[[], Any]) -> None:
        value = failure = None
        try:
            value = work()
        except Exception as error:
            failure = self._failed(error)
            logger.error("training rank %d failed in the %s: %s", self._rank_id.rank, self._subject, failure.text)
        self._gathering.report(value, failure=failure)
        self._is_reported = True

    def _conclude(self, decide: Callable[[], Any]) -> None:
        value = failure = None
        try:
            value = decide()
        except StoreLostError:
            raise
        except Exception as error:
            failure = self._failed(error).by(self._rank_id)
        self._gathering.conclude(value, failure=failure)

    def _failed(self, error: Exception) -> Failure:
        self._error = self._error or error
        failure = Failure.of(error, otherwise=self._error_class)
        is_full = classify(error) is ForeignCause.NO_SPACE
        return replace(failure, text=f"{failure.text}: free some space on its disk") if is_full else failure

    def _reports(self, deadline: Deadline) -> list[Any] | Exception:
        """Returns every rank's report, or the error that prevents a decision."""
        try:
            return self._gathering.values(deadline)
        except StoreLostError:
            raise
        except Exception as error:
            return error

    def _decided(self, reports: list[Any] | Exception) -> Any:
        if isinstance(reports, Exception):
            raise reports
        return self._decide_from(reports)
