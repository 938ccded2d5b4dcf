"""Runs verl's weight sync, a coroutine that sometimes blocks. Notes the calls in which it waits for the rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import wraps
from typing import Any

import ray

from rl_safe_workers.adapters.call_errors import call_error_of, keep_origins
from rl_safe_workers.adapters.job_inquiry import ROLLOUT
from rl_safe_workers.adapters.verl.process import TrainerProcess
from rl_safe_workers.adapters.weight_update import WeightUpdate
from rl_safe_workers.errors import RunError, foreign_cause, in_one_line
from rl_safe_workers.frames import Frame, relative, telling_frame
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role

_CALLS = ("resume", "release", "update_weights", "send_weights")
"""Coroutines of verl's rollout and checkpoint engine in which a rank waits for rollout engines."""
_ENGINE_CALL = "_execute_method"
"""Coroutine of verl's vLLM adapter that calls the engine. With ``non_block`` it returns a reference to the answer."""
_CACHE = "kv_cache"
"""The tag with which verl tells an engine to allocate its KV cache."""


class RolloutCalls:
    """Notes the calls in which this rank waits for the rollout.

    Attributes:
        awaited: The rollout rank that this rank is calling, or words for it; None outside of such calls.
    """

    def __init__(self, rollout: Sequence[Any], *, before_cache: Callable[[], object]) -> None:
        """Wraps the objects, to note each call to them from now on.

        Args:
            rollout: The objects through which this rank reaches the rollout. A None among them is skipped.
            before_cache: Is called before a call that makes an engine allocate its KV cache.
        """
        keep_origins()
        self.awaited: RankId | str | None = None
        self._before_cache = before_cache
        self._answer: tuple[RankId | str, Future[Any]] | None = None
        """The rollout rank that this rank sends weights to, or words for it, and the answer of its engine."""
        for one in rollout:
            replica = getattr(one, "replica_rank", None)
            called = ROLLOUT if replica is None else RankId(Role.ROLLOUT, replica)
            if hasattr(one, _ENGINE_CALL):
                setattr(one, _ENGINE_CALL, self._kept(called, getattr(one, _ENGINE_CALL)))
            for name in _CALLS:
                if hasattr(one, name):
                    setattr(one, name, self._noted(called, getattr(one, name)))

    def raise_failure(self) -> None:
        """Raises if an engine has failed while this rank sends weights to it.

        verl reads the engine's answer only after it has sent all weights. Each send blocks until the engine reads.

        Raises:
            RunError: Names the rollout rank, and quotes the engine's error.
        """
        if self._answer is None or not self._answer[1].done():
            return
        called, answer = self._answer
        try:
            answer.result()
        except Exception as error:
            # The text of Ray's error begins with a traceback.
            text = in_one_line(error) if (raised := call_error_of(error)) is None else raised.text
            culprit = called if isinstance(called, RankId) else None
            raise RunError(
                f"{called} failed to load weights: {text}", culprit=culprit, foreign=foreign_cause(error)
            ) from error

    def _kept(self, called: RankId | str, stock: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stock)
        async def call(*args: Any, **kwargs: Any) -> Any:
            answer = await stock(*args, **kwargs)
            if isinstance(answer, ray.ObjectRef):
                self._answer = called, answer.future()
            return answer

        return call

    def _noted(self, called: RankId | str, stock: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stock)
        async def call(*args: Any, **kwargs: Any) -> Any:
            if any(_CACHE in value for value in (*args, *kwargs.values()) if isinstance(value, list)):
                self._before_cache()
            self.awaited = called
            try:
                return await stock(*args, **kwargs)
            finally:
                self.awaited = None

        return call


class CoroutineUpdate:
    """verl's ``update_weights`` on one training rank."""

    def __init__(
        self, process: TrainerProcess, update: Callable[[], Coroutine[Any, Any, Any]], *, calls: RolloutCalls
    ) -> None:
        """Stores its arguments.

        Args:
            process: This process.
            update: verl's own sync.
            calls: This rank's calls to the rollout.
        """
        self._process, self._update, self._calls = process, update, calls
        self._coroutine: Coroutine[Any, Any, Any] | None = None

    async def run(self) -> Any:
        """Runs the sync as a phase, and returns the value of verl's sync. Collective over: the training world.

        Raises:
            PhaseTimeoutError: As `WeightUpdate.finish`.
            RunError: As `WeightUpdate.finish`.
            Exception: What verl's sync or an engine has raised.
        """
        trainer = self._process.trainer
        update = WeightUpdate(
            trainer, self._send, awaited=self._awaited, place=self._place, check=self._calls.raise_failure
        )
        with trainer.phase(Phase.SYNC):
            update.begin()
            return await asyncio.to_thread(update.finish)

    def _send(self) -> Any:
        self._coroutine = self._update()
        return asyncio.run(self._coroutine)

    def _awaited(self, frames: Sequence[Frame]) -> RankId | str | None:
        return None if self._process.is_gathering else self._calls.awaited

    def _place(self) -> str | None:
        """Returns the line of code in which the coroutine awaits something; None if it is running."""
        awaiting: list[Frame] = []
        waiting: Any = self._coroutine
        while (frame := getattr(waiting, "cr_frame", None)) is not None and not waiting.cr_running:
            code = frame.f_code
            awaiting.insert(0, Frame(file=relative(code.co_filename), line=frame.f_lineno, function=code.co_name))
            waiting = waiting.cr_await
        found = telling_frame(awaiting)
        return None if found is None else str(found)
