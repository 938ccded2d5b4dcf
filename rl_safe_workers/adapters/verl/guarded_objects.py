"""Wraps the objects in which verl's driver waits, so that each wait has a deadline.

The objects are attributes of verl's trainer. Each is wrapped when verl sets it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ray.exceptions import RayError

from rl_safe_workers.adapters.driver_waits import DriverWaits, Standstill
from rl_safe_workers.adapters.patches import PassThrough, replaced
from rl_safe_workers.errors import RankError, RlSafeError, first_line
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId

logger = logging.getLogger(__name__)

_OF_ENGINES = (
    *("sleep_replicas", "wake_up_replicas", "abort_replicas"),
    *("resume_generation_replicas", "release_kv_cache_replicas", "resume_kv_cache_replicas"),
)
"""Methods of verl's ``CheckpointEngineManager`` that wait only for rollout engines."""
SYNC_CALLS = ("update_weights", *_OF_ENGINES)
"""Methods of verl's ``CheckpointEngineManager`` that wait for training ranks or for rollout engines."""


class GuardedCalls(PassThrough):
    """Wraps one of verl's objects. Gives some of its methods a deadline, and passes everything else through."""

    def __init__(self, stock: Any, waits: DriverWaits, phases: Mapping[str, Phase], *, what: str) -> None:
        """Guards the object.

        Args:
            stock: verl's object.
            waits: The driver's waits.
            phases: The methods that get a deadline: the phase of each, by the method's name.
            what: The work that its methods do, for errors.
        """
        super().__init__(stock)
        self._waits, self._phases, self._what = waits, phases, what

    def _passed(self, name: str, value: Any) -> Any:
        if name not in self._phases:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            what = f"{self._what} ({name})"
            work = partial(value, *args, **kwargs)
            return self._waits.bounded(self._phases[name], what, work, workers_first=name not in _OF_ENGINES)

        return call


class GuardedRows(PassThrough):
    """Wraps one of verl's data loaders. Gives each batch a deadline, and passes everything else through."""

    def __init__(self, loader: Any, waits: DriverWaits) -> None:
        """Guards the loader.

        Args:
            loader: verl's loader for training or for validation. Its prompts are for a rollout, so the timeout of phase
                ``rollout`` applies.
            waits: The driver's waits.
        """
        super().__init__(loader)
        self._waits = waits

    def __len__(self) -> int:
        return len(self._stock)

    def __iter__(self) -> Iterator[Any]:
        rows, end = iter(self._stock), object()
        while (batch := self._waits.of_driver(Phase.ROLLOUT, "loading prompts", partial(next, rows, end))) is not end:
            yield batch


def guarded_transfer(manager: Any, waits: DriverWaits) -> GuardedCalls:
    """Guards verl's ``CheckpointEngineManager``, which sends weights and puts engines to sleep."""
    return GuardedCalls(manager, waits, dict.fromkeys(SYNC_CALLS, Phase.SYNC), what="the weight sync")


def guarded_agents(manager: Any, waits: DriverWaits) -> GuardedCalls:
    """Guards verl's ``AgentLoopManager``, which hands prompts to the agent loops."""
    return GuardedCalls(manager, waits, {"generate_sequences": Phase.ROLLOUT}, what="handing out prompts")


def guarded_samples(buffer: Any, waits: DriverWaits) -> Any:
    """Makes verl's ``ReplayBuffer`` raise if no response has ended within the timeout of generation.

    verl polls every two seconds (replay_buffer.py:391). If a user's sampler polls in another way, the deadline applies
    to its whole call.
    """
    if not hasattr(buffer, "_wait_for_next_poll"):
        return GuardedCalls(
            buffer, waits, {"sample": Phase.ROLLOUT, "wait_for_sampleable": Phase.ROLLOUT}, what="generation"
        )
    polls = _Polls(buffer, waits)
    buffer._wait_for_next_poll, buffer.sample = polls.wait, polls.sample
    return buffer


class _Polls:
    """Wraps verl's polls for finished prompts. Raises if nothing changes within the timeout of generation."""

    def __init__(self, buffer: Any, waits: DriverWaits) -> None:
        self._buffer, self._waits, self._stock = buffer, waits, buffer._wait_for_next_poll
        self._standstill = Standstill()
        self._sample = buffer.sample
        self._told: set[tuple[RankId, str | None]] = set()
        """Errors already logged: the engine or reward worker that raised, and its line of code."""
        self._survived: set[float] = set()
        """Times of the errors that an earlier call has survived: it still returned prompts."""

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Samples as verl does.

        Raises:
            RankError: If sampling fails, and an engine or a reward worker has raised since the last call that returned.
        """
        with self._waits.waiting(Phase.ROLLOUT):
            try:
                found = self._sample(*args, **kwargs)
            except (RlSafeError, RayError):
                raise
            except Exception as error:
                if not (heard := [one for one in self._waits.heard() if one.raised_at not in self._survived]):
                    raise
                raise heard[0] from error
            self._survived |= {report.raised_at for report in self._tell()}
        return found

    def _tell(self) -> list[RankError]:
        """Logs errors of engines and reward workers, because verl drops the prompt and goes on. Returns all of them."""
        heard = self._waits.heard()
        for report in heard:
            if (report.rank_id, report.place) not in self._told:
                self._told.add((report.rank_id, report.place))
                logger.error("rl_safe: %s; verl goes on without the answer", first_line(report))
        return heard

    def wait(self, partition_id: str, last_debug_time: float) -> Any:
        """Waits for the next poll.

        Raises:
            PhaseTimeoutError: If nothing has changed within the timeout of generation.
            RunError: If a process of the job has died.
        """
        found = self._progress(partition_id)
        waited_s = self._standstill.seconds(found)
        if waited_s >= self._waits.timeout_s(Phase.ROLLOUT):
            _, pending, running, finished, failed, _ = found
            detail = (
                f"no response has ended for that long; prompts: {len(pending)} pending, {len(running)} running, "
                f"{len(finished)} finished, {len(failed)} failed"
            )
            raise self._waits.late(Phase.ROLLOUT, "generation", waited_s, detail)
        left_s = self._waits.timeout_s(Phase.ROLLOUT) - waited_s
        with replaced(self._buffer, "poll_interval", lambda interval_s: min(interval_s, left_s), absent=math.inf):
            debug_time = self._stock(partition_id, last_debug_time)
        # verl's driver holds no reference to the agent loops' work, so Ray does not raise when an agent loop dies. If
        # an engine dies, its prompts end as failed. verl then stops polling, and only the weight sync would fail.
        self._waits.check_alive(Phase.ROLLOUT, "generation")
        self._tell()
        return debug_time

    def _progress(self, partition_id: str) -> tuple[Any, ...]:
        """Returns a value that changes whenever a response ends. Prompts never reuse the key of an earlier prompt."""
        buffer = self._buffer
        prompts = (buffer.pending_keys, buffer.running_keys, buffer.finished_keys, buffer.failure_keys)
        responses = len(buffer.partitions[partition_id])
        return partition_id, *(frozenset(keys[partition_id]) for keys in prompts), responses
