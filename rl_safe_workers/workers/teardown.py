"""The teardown mixin: an exit that all trainers have agreed on."""

from __future__ import annotations

import logging

from rl_safe_workers.comms.teardown import destroy_groups, exchange_verdicts
from rl_safe_workers.errors import RlSafeError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.workers.comms import CommsMixin

logger = logging.getLogger(__name__)


class TeardownMixin(CommsMixin):
    """Ends the training world: together if all is well, without any collective if not."""

    _verdict: dict[int, str] | None = None

    def teardown(self, failure: str | None = None) -> dict[int, str]:
        """Exchanges verdicts, then destroys every group if all is well. Idempotent; also after a partial set-up.

        Collective over: the training world. If some rank failed or gave no verdict, groups are left alone: their
        destruction would wait for that rank. The process is then to be ended from outside.

        Args:
            failure: None if this rank is well, else one line of what failed.

        Returns:
            Failure by training rank; empty if every rank was well.
        """
        with self.lifecycle.enter(Phase.TEARDOWN):
            self.leave()
            if not hasattr(self, "world") or self._verdict is not None:
                return self._verdict or {}
            failure = self._finish_everything() if failure is None else self._give_up_everything(failure)
            timeout = self.timeout(Phase.TEARDOWN)
            failed = exchange_verdicts(
                self.store,
                training_rank=self.training_rank,
                size=self.training_size,
                failure=failure,
                timeout=timeout,
            )
            if failed:
                logger.warning("teardown: groups are left as they are, because of %s", failed)
                self._verdict = failed
                return failed
            self.roll_call.arrive(Phase.TEARDOWN, timeout=timeout)
            destroy_groups(self.world)
            self._verdict = {}
            # The owner of the store stays until every other trainer has left its groups.
            self.roll_call.sign_off(Phase.TEARDOWN, timeout=timeout)
            return {}

    def _finish_everything(self) -> str | None:
        """Lets the other mixins finish what must not reach into the teardown; returns what failed, or None."""
        try:
            self.check_phase(Phase.TEARDOWN)
        except RlSafeError as error:
            logger.warning("teardown: %s", error)
            return str(error)
        return None

    def _give_up_everything(self, failure: str) -> str:
        """Lets the other mixins tell whoever waits for this rank that it has failed; returns what has failed."""
        try:
            self.give_up(failure)
        except RlSafeError as error:
            # The verdicts say so, too: they are exchanged over the same store.
            logger.warning("teardown: %s", error)
        return failure
