"""The teardown mixin: an exit that all trainers have agreed on."""

from __future__ import annotations

import logging
from datetime import timedelta

from rl_safe_workers.comms.ending import failure_of, within
from rl_safe_workers.comms.teardown import abort_groups, destroy_groups
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.errors import RlSafeError, in_one_line
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.workers.comms import CommsMixin

logger = logging.getLogger(__name__)

_ABORT = timedelta(seconds=10)
"""Longest time to abort groups that cannot be destroyed."""
_JOINT_SHARE = 0.5
"""Of the teardown's time, to leave the joint group."""


class TeardownMixin(CommsMixin):
    """Ends the training world: together if all is well, without any collective if not."""

    _verdict: dict[int, str] | None = None

    def teardown(self, failure: str | None = None) -> dict[int, str]:
        """Exchanges verdicts, then destroys every group if all is well. Idempotent; also after a partial set-up.

        Collective over: the training world. If some rank failed or gave no verdict, or does not come after it has given
        one, groups are not destroyed, which would wait for that rank, but aborted, so that this process can end by
        itself.

        Args:
            failure: None if this rank is well, else one line of what failed.

        Returns:
            Failure by training rank; empty if every rank was well.

        Raises:
            CommunicatorError: If the groups could not be destroyed within ``rl_safe.timeouts.teardown``.
            PhaseTimeoutError: If a rank that was well does not come in time; names it.
        """
        with self.lifecycle.enter(Phase.TEARDOWN):
            if not hasattr(self, "world") or self._verdict is not None:
                self.leave(failed=True)
                return self._verdict or {}
            failure = self._finish_everything() if failure is None else self._give_up_everything(failure)
            self._deadline = Deadline.after(self.timeout(Phase.TEARDOWN))
            failure = self._leave_joint_group(failure)
            try:
                failed = self.control.exchange_verdicts(failure, phase=Phase.TEARDOWN, deadline=self._deadline)
                self._verdict = failed
                if failed:
                    logger.warning("teardown: groups are aborted, because of %s", failed)
                    abort_groups(self.world, timeout=_ABORT)
                    return failed
                self.control.barrier(Phase.TEARDOWN, self._deadline)
            except RlSafeError as error:
                self._verdict = {self.training_rank: str(error)}
                abort_groups(self.world, timeout=_ABORT)
                raise
            destroy_groups(self.world, timeout=self.remaining())
            # The owner of the store stays until every other trainer has left its groups.
            self.control.sign_off(Phase.TEARDOWN, self._deadline)
            return {}

    def _finish_everything(self) -> str | None:
        """Lets the other mixins finish what must not reach into the teardown; returns what failed, or None."""
        try:
            self.check_phase(Phase.TEARDOWN)
        except RlSafeError as error:
            logger.warning("teardown: %s", error)
            return str(error)
        return None

    def _leave_joint_group(self, failure: str | None) -> str | None:
        """Leaves it without waiting where something has failed; NCCL waits for rollout ranks else, here not too long.

        Returns what has failed, or None.
        """
        if failure is not None:
            self.leave(failed=True)
            return failure
        left = failure_of(lambda: within(self.leave, _JOINT_SHARE * self.remaining(), what="leaving the joint group"))
        return None if left is None else in_one_line(left)

    def _give_up_everything(self, failure: str) -> str:
        """Lets the other mixins tell whoever waits for this rank that it has failed; returns what has failed."""
        try:
            self.give_up(failure)
        except RlSafeError as error:
            # The verdicts say so, too: they are exchanged over the same store.
            logger.warning("teardown: %s", error)
        return failure
