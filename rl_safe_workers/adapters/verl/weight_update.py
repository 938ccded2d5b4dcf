"""verl's weight sync as a phase: with a deadline, an agreement of all trainers, and somebody to blame.

verl's ``update_weights`` is a coroutine that blocks in places: in a collective of the bridge, or in a read from a
rollout engine that may never answer. So it runs on a thread of its own, and its calls of the rollout are noted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

from rl_safe_workers.adapters.verl.process import TrainerProcess
from rl_safe_workers.control.bounded import in_background
from rl_safe_workers.control.deadline import DeadlineExceededError
from rl_safe_workers.control.failure import as_ours
from rl_safe_workers.diagnostics.answering import place_of_call
from rl_safe_workers.diagnostics.stacks import CallFrame
from rl_safe_workers.errors import Awaited, PhaseTimeoutError
from rl_safe_workers.frames import Frame, relative, telling_frame
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.worlds.training_world import set_group_timeouts

_HEARD = timedelta(seconds=2)
"""How long the ranks listen to each other once the deadline has passed, or one of them has failed."""
_CALLS = ("resume", "release", "update_weights", "send_weights")
"""Coroutines of a rollout or a checkpoint engine of verl's, in which a rank waits for rollout engines."""
_CACHE = "kv_cache"
"""The tag with which verl has an engine allocate its KV cache."""
_THREAD = CallFrame("adapters/verl/weight_update.py", "_on_this_thread")


class RolloutCalls:
    """Notes the calls in which this rank waits for the rollout.

    Attributes:
        awaited: The rollout that this rank is in a call of; None if it is in none.
    """

    def __init__(self, rollout: Sequence[Any], *, before_cache: Callable[[], object]) -> None:
        """Notes each call of some objects from now on.

        Args:
            rollout: The objects through which this rank reaches the rollout; None among them is passed over.
            before_cache: Called before a call that makes an engine allocate its KV cache.
        """
        self.awaited: str | None = None
        self._before_cache = before_cache
        for one in rollout:
            for name in _CALLS:
                if hasattr(one, name):
                    setattr(one, name, self._noted(one, getattr(one, name)))

    def _noted(self, rollout: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
        replica = getattr(rollout, "replica_rank", None)
        name = "the rollout" if replica is None else f"rollout replica {replica}"

        @wraps(stock)
        async def call(*args: Any, **kwargs: Any) -> Any:
            if any(_CACHE in value for value in (*args, *kwargs.values()) if isinstance(value, list)):
                self._before_cache()
            self.awaited = name
            try:
                return await stock(*args, **kwargs)
            finally:
                self.awaited = None

        return call


class WeightUpdate:
    """One weight sync on one training rank."""

    def __init__(
        self, process: TrainerProcess, update: Callable[[], Coroutine[Any, Any, Any]], *, calls: RolloutCalls
    ) -> None:
        """Begins nothing yet.

        Args:
            process: This process.
            update: verl's own sync.
            calls: This rank's calls of the rollout.
        """
        self._process, self._trainer = process, process.trainer
        self._update, self._calls = update, calls
        self._coroutine: Coroutine[Any, Any, Any] | None = None

    async def run(self) -> Any:
        """Does the sync, and returns what verl's returns. Collective over: the training world.

        Raises:
            PhaseTimeoutError: If it does not end within ``timeouts.sync``; names the ranks that did not come, or the
                rollout that this rank waits for.
            RunError: If another rank has failed; names it.
        """
        trainer = self._trainer
        with trainer.phase(Phase.SYNC):
            # A collective that times out may end this process, which first has to tell the others what it waits for.
            set_group_timeouts(trainer.remaining() + 2 * _HEARD)
            work = in_background(self._on_this_thread)
            value, place, failure = None, None, None
            try:
                value = await asyncio.to_thread(work.wait, trainer.deadline)
            except DeadlineExceededError:
                place, failure = self._blame()
            except Exception as error:
                failure = error
            self._agree(place, failure)
            return value

    def _on_this_thread(self) -> Any:
        self._coroutine = self._update()
        return asyncio.run(self._coroutine)

    def _blame(self) -> tuple[str | None, Exception | None]:
        """Returns the line in which this rank waits for training ranks; or the error that blames the rollout."""
        rollout, is_gathering = self._calls.awaited, self._process.is_gathering
        place = self._place()
        if rollout is None or is_gathering:
            return place, None
        who = f"{rollout}, awaited by training rank {self._trainer.training_rank},"
        return None, self._late(who, f"it waits in {place}")

    def _place(self) -> str:
        """Returns the line of code that the sync is at: where its coroutine awaits something, or its thread works."""
        awaiting: list[Frame] = []
        waiting: Any = self._coroutine
        while (frame := getattr(waiting, "cr_frame", None)) is not None and not waiting.cr_running:
            code = frame.f_code
            awaiting.insert(0, Frame(file=relative(code.co_filename), line=frame.f_lineno, function=code.co_name))
            waiting = waiting.cr_await
        return str(telling_frame(awaiting) or place_of_call(_THREAD) or "code that could not be read")

    def _late(self, name: str, detail: str) -> PhaseTimeoutError:
        return PhaseTimeoutError(
            phase=Phase.SYNC,
            awaited=Awaited(name),
            waited_s=self._trainer.deadline.waited_s,
            setting=f"rl_safe.timeouts.{Phase.SYNC}",
            detail=detail,
        )

    def _agree(self, place: str | None, failure: Exception | None) -> None:
        """Learns how the others have fared. Collective over: the training world, through the store.

        Args:
            place: Where this rank still waits for training ranks; None if it does not.
            failure: What this rank has failed with; None if it is well.
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
            # The others may not know of it yet, but this rank does.
            raise as_ours(failure) from failure

    def _refuse_standstill(self, places: Sequence[str | None]) -> None:
        """Fails on every rank if ranks wait for each other, and none of them for the rollout."""
        waiting = [f"training rank {rank} in {place}" for rank, place in enumerate(places) if place is not None]
        if waiting:
            raise self._late("the weight sync", f"waiting for other training ranks: {', '.join(waiting)}")
