"""Runs a host's weight sync on one training rank, under a deadline. All trainers agree on which rank to blame.

A sync may wait forever: in a collective of the bridge, or for a rollout engine that never answers. So it runs on a
thread of its own. At the deadline, all training ranks tell each other where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rl_safe_workers.adapters.job_inquiry import SYNC_CALL
from rl_safe_workers.control.bounded import in_background
from rl_safe_workers.control.deadline import Background, DeadlineExceededError
from rl_safe_workers.control.failure import as_ours
from rl_safe_workers.diagnostics.answering import stack_of_call
from rl_safe_workers.errors import Awaited, PhaseTimeoutError
from rl_safe_workers.frames import Frame
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, trainer_id
from rl_safe_workers.setting_names import timeout_setting
from rl_safe_workers.worlds.training_rank import TrainingRank
from rl_safe_workers.worlds.training_world import set_group_timeouts

_SYNC = "the weight sync"
_HEARD = timedelta(seconds=2)
"""How long the ranks listen to each other after the deadline has passed, or after a rank has failed."""


class WeightUpdate:
    """One weight sync on one training rank, within phase ``sync``."""

    def __init__(
        self,
        trainer: TrainingRank,
        send: Callable[[], Any],
        *,
        awaited: Callable[[Sequence[Frame]], RankId | str | None],
        place: Callable[[], str | None] = lambda: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Stores its arguments.

        Args:
            trainer: This rank.
            send: The host's own sync.
            awaited: Takes the frames of the sync's thread, innermost first. Returns the rollout rank that this rank
                waits for, or words for the rollout if the rank is unknown; None if it waits for training ranks.
            place: Returns the line of code that the sync is at, if its thread does not show it.
            check: Called repeatedly during the sync. Raises if the sync can never end, e.g. because an engine has
                failed.
        """
        self._trainer, self._send, self._awaited, self._place_of_host = trainer, send, awaited, place
        self._check = check
        self._work: Background[Any] | None = None

    def begin(self) -> None:
        """Begins the sync, on this thread's device. Does not wait."""
        # A collective that times out may end this process. Before that, this rank must tell the others where it waits.
        set_group_timeouts(self._trainer.remaining() + 2 * _HEARD)
        self._work = in_background(self._on_this_thread, name="the weight sync")

    def finish(self) -> Any:
        """Waits for the sync, and returns its value. Collective over: the training world, through the store.

        Raises:
            PhaseTimeoutError: If the sync does not end within the deadline of the phase. The error names the ranks that
                did not come, or the rollout that this rank waits for.
            RunError: If another rank has failed; names it.
            Exception: What the sync or ``check`` has raised.
        """
        assert self._work is not None, "begun"
        value, place, failure = None, None, None
        try:
            value = self._work.wait(self._trainer.deadline, on_tick=self._check)
        except DeadlineExceededError:
            place, failure = self._blame()
        except Exception as error:
            failure = error
        self._agree(place, failure)
        return value

    def _on_this_thread(self) -> Any:
        """Runs the host's sync. `job_inquiry.SYNC_CALL` finds the sync's stack by this name."""
        return self._send()

    def _blame(self) -> tuple[str | None, Exception | None]:
        """Returns the line of code in which this rank waits for training ranks, or an error that blames the rollout."""
        stack = stack_of_call(SYNC_CALL)
        rollout = self._awaited(() if stack is None else stack.frames)
        at = self._place_of_host() or (None if stack is None else stack.place)
        place = "code that could not be read" if at is None else str(at)
        if rollout is None:
            return place, None
        here = self._trainer.training_rank
        if isinstance(rollout, RankId):
            awaited = Awaited(_SYNC, frozenset({trainer_id(here), rollout}))
            return None, self._late(awaited, f"training rank {here} waits in {place}", missing=(rollout,))
        return None, self._late(Awaited(f"{rollout}, awaited by training rank {here},"), f"the rank waits in {place}")

    def _late(self, awaited: Awaited, detail: str, missing: Sequence[RankId] = ()) -> PhaseTimeoutError:
        return PhaseTimeoutError(
            phase=Phase.SYNC,
            awaited=awaited,
            missing=missing,
            waited_s=self._trainer.deadline.waited_s,
            setting=timeout_setting(Phase.SYNC),
            detail=detail,
        )

    def _agree(self, place: str | None, failure: Exception | None) -> None:
        """Exchanges with the other ranks how the sync went. Collective over: the training world, through the store.

        Args:
            place: Where this rank still waits for training ranks; None if it does not.
            failure: The error of this rank; None if it has none.
        """
        deadline = self._trainer.deadline.plus(_HEARD)
        if failure is not None:
            deadline = deadline.at_most(_HEARD)
        gathering = self._trainer.control.gathering("weight update", phase=Phase.SYNC)
        try:
            gathering.settle(deadline, failure=failure, report=place, decide=self._refuse_standstill)
        except PhaseTimeoutError:
            if failure is None:
                raise
            # The others may not know of this rank's failure yet, so raise it here.
            raise as_ours(failure) from failure

    def _refuse_standstill(self, places: Sequence[str | None]) -> None:
        """Raises on every rank if ranks wait for each other and no rank waits for the rollout."""
        waiting = [f"training rank {rank} in {place}" for rank, place in enumerate(places) if place is not None]
        if waiting:
            raise self._late(Awaited(_SYNC), f"waiting for other training ranks: {', '.join(waiting)}")
