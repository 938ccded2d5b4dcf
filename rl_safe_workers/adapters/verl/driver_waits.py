"""The waits of verl's driver for generation and weight syncs, each with a deadline and somebody to blame.

verl's trainer waits without end: it polls for finished prompts, and calls ``ray.get`` without a timeout. The objects
that it waits in are attributes of the trainer, so each is guarded when verl sets it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import ray

from rl_safe_workers.adapters.verl.settings import VerlTimeouts
from rl_safe_workers.control.deadline import Deadline, DeadlineExceededError, run_bounded
from rl_safe_workers.errors import Awaited, PhaseTimeoutError, RunError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WORKERS_FIRST_S = 4.0
"""Seconds that the driver waits longer than its workers, who know better whom they wait for."""
_ANSWER_S = 3.0
"""Seconds in which a process that is well answers a question."""

SYNC_CALLS = (
    *("update_weights", "sleep_replicas", "wake_up_replicas", "abort_replicas"),
    *("resume_generation_replicas", "release_kv_cache_replicas", "resume_kv_cache_replicas"),
)
"""Methods of verl's ``CheckpointEngineManager`` that wait for training ranks or for rollout engines."""


class Party(NamedTuple):
    """A process that the driver may wait for."""

    name: str
    rank: RankId | None
    """Its rank; None for a process that neither trains nor generates."""
    ask: Callable[[], Any]
    """Asks it something, and returns the reference to its answer."""


class DriverWaits:
    """Bounds the driver's waits, and finds the processes that do not answer when one has ended."""

    def __init__(self, timeouts: VerlTimeouts, parties: Callable[[], Sequence[Party]]) -> None:
        """Guards nothing yet.

        Args:
            timeouts: The deadlines, by phase.
            parties: Lists the processes of the job that exist by now.
        """
        self._timeouts, self._parties = timeouts, parties

    def timeout_s(self, phase: Phase) -> float:
        """Returns the timeout of a phase in seconds."""
        found: float = getattr(self._timeouts, phase.value)
        return found

    def bounded(self, phase: Phase, what: str, work: Callable[[], T]) -> T:
        """Does some work of verl's on a thread of its own; returns its value.

        Args:
            phase: The phase whose timeout bounds it.
            what: The work, for errors.
            work: What may wait for another process.

        Raises:
            PhaseTimeoutError: If it does not end in time; names the processes that do not answer.
            RunError: If it fails, and a process does not answer.
        """
        deadline = Deadline.after(self.timeout_s(phase) + _WORKERS_FIRST_S)
        try:
            return run_bounded(work, deadline, name=what)
        except DeadlineExceededError:
            raise self.late(phase, what, deadline.waited_s) from None
        except ray.exceptions.RayError as error:
            silent = [] if _names_missing(error) else self._silent()
            if not silent:
                raise
            raise RunError(f"{what}: {_told(silent)}; {last_line(error)}", culprit=_first_rank(silent)) from error

    def late(self, phase: Phase, what: str, waited_s: float, detail: str = "") -> PhaseTimeoutError:
        """Returns the error of a wait that has passed its deadline; asks every process whether it is well."""
        silent = self._silent()
        ranks = [party.rank for party, _ in silent if party.rank is not None]
        return PhaseTimeoutError(
            phase=phase,
            awaited=Awaited(what, frozenset(p.rank for p in self._parties() if p.rank is not None)),
            missing=ranks,
            waited_s=waited_s,
            setting=f"rl_safe.timeouts.{phase}",
            detail="; ".join(filter(None, (detail, _told(silent) or "every process of the job answers"))),
        )

    def _silent(self) -> list[tuple[Party, str]]:
        """Asks every process something; returns those without an answer, and why."""
        asked = {party.ask(): party for party in self._parties()}
        if not asked:
            return []
        answered, late = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
        found = [(asked[call], "does not answer") for call in late]
        for call in answered:
            try:
                ray.get(call)
            except ray.exceptions.RayActorError:
                found.append((asked[call], "has died"))
            except ray.exceptions.RayError as error:
                logger.debug("%s answers with %s", asked[call].name, last_line(error))
        return found


def _told(silent: Sequence[tuple[Party, str]]) -> str:
    return ", ".join(f"{party.name} {why}" for party, why in silent)


def _first_rank(silent: Sequence[tuple[Party, str]]) -> RankId | None:
    return next((party.rank for party, _ in silent if party.rank is not None), None)


def last_line(error: BaseException) -> str:
    """Returns the last line of an error's text; Ray puts the cause there."""
    return (str(error).splitlines() or [""])[-1]


def _names_missing(error: ray.exceptions.RayError) -> bool:
    """Returns True if a worker has already told whom it waits for."""
    return isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, PhaseTimeoutError)


class GuardedCalls:
    """One of verl's objects, some of whose methods end in time. Everything else is the object's own."""

    def __init__(self, stock: Any, waits: DriverWaits, phases: Mapping[str, Phase], *, what: str) -> None:
        """Guards the object.

        Args:
            stock: verl's object.
            waits: The driver's waits.
            phases: The phase of each method that is to end in time, by its name.
            what: What its methods do, for errors.
        """
        self._stock, self._waits, self._phases, self._what = stock, waits, phases, what

    def __getattr__(self, name: str) -> Any:
        if name == "_stock":  # asked of a copy that is being made
            raise AttributeError(name)
        value = getattr(self._stock, name)
        if name not in self._phases:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            what = f"{self._what} ({name})"
            return self._waits.bounded(self._phases[name], what, partial(value, *args, **kwargs))

        return call


def guarded_transfer(manager: Any, waits: DriverWaits) -> GuardedCalls:
    """Guards verl's ``CheckpointEngineManager``, which sends weights and puts engines to sleep."""
    return GuardedCalls(manager, waits, dict.fromkeys(SYNC_CALLS, Phase.SYNC), what="the weight sync")


def guarded_agents(manager: Any, waits: DriverWaits) -> GuardedCalls:
    """Guards verl's ``AgentLoopManager``, which hands prompts to the agent loops."""
    return GuardedCalls(manager, waits, {"generate_sequences": Phase.ROLLOUT}, what="handing out prompts")


def guarded_samples(buffer: Any, waits: DriverWaits) -> Any:
    """Has verl's ``ReplayBuffer`` raise once no response has ended for the timeout of generation.

    verl polls every two seconds (replay_buffer.py:391). A sampler of the user's that polls otherwise is bound as a
    whole.
    """
    if not hasattr(buffer, "_wait_for_next_poll"):
        return GuardedCalls(
            buffer, waits, {"sample": Phase.ROLLOUT, "wait_for_sampleable": Phase.ROLLOUT}, what="generation"
        )
    buffer._wait_for_next_poll = _Polls(buffer, waits).wait
    return buffer


class _Polls:
    """verl's polls for finished prompts, as long as something changes from time to time."""

    def __init__(self, buffer: Any, waits: DriverWaits) -> None:
        self._buffer, self._waits, self._stock = buffer, waits, buffer._wait_for_next_poll
        self._seen: tuple[Any, ...] = ()
        self._since_s = 0.0

    def wait(self, partition_id: str, last_debug_time: float) -> Any:
        """Waits for the next poll.

        Raises:
            PhaseTimeoutError: If nothing has changed for the timeout of generation.
        """
        found = self._progress(partition_id)
        if found != self._seen:
            self._seen, self._since_s = found, time.monotonic()
        waited_s = time.monotonic() - self._since_s
        if waited_s >= self._waits.timeout_s(Phase.ROLLOUT):
            _, pending, running, finished, failed, _ = found
            detail = (
                f"no response has ended for that long; prompts: {len(pending)} pending, {len(running)} running, "
                f"{len(finished)} finished, {len(failed)} failed"
            )
            raise self._waits.late(Phase.ROLLOUT, "generation", waited_s, detail)
        return self._stock(partition_id, last_debug_time)

    def _progress(self, partition_id: str) -> tuple[Any, ...]:
        """Returns something that changes whenever a response ends. No prompt has the key of an earlier one."""
        buffer = self._buffer
        prompts = (buffer.pending_keys, buffer.running_keys, buffer.finished_keys, buffer.failure_keys)
        responses = len(buffer.partitions[partition_id])
        return partition_id, *(frozenset(keys[partition_id]) for keys in prompts), responses
