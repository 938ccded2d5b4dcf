"""Gives each wait of a host's driver a deadline, and names the trainers or rollout engines that do not answer.

The hosts' drivers wait without a deadline: they call ``ray.get`` without a timeout, or poll. An adapter routes those
waits through `DriverWaits`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import ray

from rl_safe_workers.adapters.call_errors import call_error_of, keep_origins
from rl_safe_workers.adapters.job_inquiry import ROLLOUT
from rl_safe_workers.compat.ray_tables import DEAD, actor_id, actor_id_of_call, actor_table
from rl_safe_workers.config import PhaseTimeouts
from rl_safe_workers.control.deadline import Background, Deadline
from rl_safe_workers.diagnostics.thread_waits import where_is
from rl_safe_workers.errors import Awaited, PhaseTimeoutError, RankError, RunError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import HELPERS, RankId, Role
from rl_safe_workers.setting_names import timeout_setting

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WORKERS_FIRST_S = 4.0
"""Seconds that the driver waits longer than its workers. The workers know better which rank they wait for."""
_ANSWER_S = 3.0
"""Seconds within which a healthy process answers a question."""
ANSWERING = frozenset({Role.ROLLOUT, Role.REWARD})
"""Roles that only serve calls in a rollout. An error that one of them raises is its own failure, not another rank's."""
_SERVED = frozenset({Phase.JOINT, Phase.ROLLOUT, Phase.SYNC})
"""Phases in which engines take part, so that a dead engine is to blame."""
_LOOK_S = 2.0
"""Seconds between two looks for dead engines. Ray fails the calls to a dead engine at once. But the driver may wait for
trainers that wait for the engine."""
HEARD = "rl_safe_heard"
"""Method of a helper. A helper is an actor that calls other ranks. The method returns a list of `call_errors.CallError`
from such calls."""
_HEARD_S = 1.0
"""Seconds within which a helper answers `HEARD`. A helper that is running a user's tool answers later."""


class Party(NamedTuple):
    """A process that the driver may wait for."""

    name: str
    rank: RankId
    actor: Any
    """Ray's handle of the process's actor."""
    ask: Callable[[], Any]
    """Sends the process a question, and returns the Ray reference to its answer."""


class Silent(NamedTuple):
    """A process that has not answered a question."""

    party: Party
    is_dead: bool

    def __str__(self) -> str:
        return f"{self.party.name} {'has died' if self.is_dead else 'does not answer'}"


class Standstill:
    """Measures for how long a value has not changed."""

    def __init__(self) -> None:
        """Starts without a value."""
        self._seen: object = self  # equal to nothing else
        self._since_s = 0.0

    def seconds(self, found: object) -> float:
        """Returns the seconds for which ``found`` has not changed.

        Args:
            found: The current value. It counts as unchanged while it equals the previous one.
        """
        now_s = time.monotonic()
        if found != self._seen:
            self._seen, self._since_s = found, now_s
        return now_s - self._since_s


class Looks:
    """Looks for dead engines from time to time, on a thread, because Ray may take any time to answer."""

    def __init__(self, look: Callable[[], None]) -> None:
        """Stores ``look``, which raises a `RunError` that names a dead engine. Begins no look yet."""
        self._look = look
        self._begun: Background[None] | None = None
        self._next = Deadline.after(_LOOK_S)

    def check(self) -> None:
        """Begins a look when it is time, or ends the one that has begun. Does not wait.

        Raises:
            RunError: If the look that ends has found a dead engine.
        """
        if self._begun is None:
            if self._next.expired:
                self._begun = Background(self._look, name="looking for dead engines")
        elif self._begun.is_done:
            begun, self._begun, self._next = self._begun, None, Deadline.after(_LOOK_S)
            try:
                begun.wait(Deadline.after(0))
            except RunError:
                raise
            except Exception as error:
                logger.warning("could not look for dead engines: %s", last_line(error))


class DriverWaits:
    """Puts the driver's waits under deadlines. When a wait fails, finds the processes that do not answer.

    Attributes:
        failed_in: The phase of the wait that has failed; None if the last wait succeeded, or was outside of phases.
    """

    def __init__(self, timeouts: PhaseTimeouts, parties: Callable[[], Sequence[Party]]) -> None:
        """Begins no wait yet. Makes errors of remote calls keep their actor; see `call_errors.keep_origins`.

        Args:
            timeouts: The deadlines, by phase.
            parties: Lists the processes of the job that exist by now.
        """
        keep_origins()
        self._timeouts, self._parties = timeouts, parties
        self._bounding = threading.local()
        self.failed_in: str | None = None
        self._failures: dict[threading.Thread, BaseException] = {}

    @property
    def failure(self) -> BaseException | None:
        """The error of a thread's last wait in a phase, which the host may have swallowed; None if all succeeded."""
        return next(iter(self._failures.values()), None)

    @property
    def is_bounding(self) -> bool:
        """True on a thread that runs work for `bounded`."""
        return bool(getattr(self._bounding, "here", False))

    def timeout_s(self, phase: str) -> float:
        """Returns the timeout of a phase in seconds."""
        found: float = getattr(self._timeouts, str(phase))
        return found

    @contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Sets `failed_in` and `failure` if the body fails. Sets no deadline.

        A later wait of the same thread clears `failure` if it succeeds.

        Args:
            phase: The phase that the job's processes go through in the body.
        """
        self.failed_in = None
        try:
            yield
        except BaseException as error:
            if self.failed_in is None:  # else a wait inside the body has set a more exact phase
                self.failed_in = phase
            if not self.is_bounding:
                self._failures[threading.current_thread()] = error
            raise
        self._failures.pop(threading.current_thread(), None)

    def bounded(
        self,
        phase: str,
        what: str,
        work: Callable[[], T],
        *,
        progress: Callable[[], object] = lambda: None,
        workers_first: bool = True,
        limit_s: float | None = None,
        calls: Sequence[Any] = (),
    ) -> T:
        """Runs some of the host's work on a thread of its own, under a deadline; returns its value.

        Args:
            phase: The phase whose timeout bounds it.
            what: The work, for errors.
            work: Runs the work, which may wait for another process.
            progress: Returns a value that changes as the work advances. Each change restarts the timeout.
            workers_first: True if training ranks take part in the work. The driver then waits a little longer than they
                do, because their error says more.
            limit_s: Seconds instead of the phase's timeout, for a call that goes through several phases.
            calls: Ray references that the work waits for, if it waits for nothing else. The error then names the
                actors whose calls have not ended, and no process is asked.

        Raises:
            PhaseTimeoutError: If nothing changes for the timeout; names the processes that do not answer.
            RunError: If the work fails and a process does not answer. Also if an engine has raised and no training
                rank took part, or if an engine has died and the phase needs engines.
        """
        if self.is_bounding:
            return work()  # the outermost bound counts
        with self.waiting(phase):
            limit_s = self.timeout_s(phase) if limit_s is None else limit_s
            limit_s += _WORKERS_FIRST_S if workers_first else 0.0
            try:
                return self._bounded(phase, what, work, progress, limit_s, calls)
            except ray.exceptions.RayError as error:
                # If training ranks take part in the call, a training rank's error may have caused the engine's error.
                if workers_first or (raised := self._raised_by_engine(phase, error)) is None:
                    raise
                raise raised from error

    def of_driver(self, phase: str, what: str, work: Callable[[], T]) -> T:
        """Runs the driver's own work under a deadline; returns its value. No other process can be to blame for a delay.

        Args:
            phase: The phase whose timeout bounds it.
            what: The work, for errors.
            work: Runs the work, which may take long, such as reading a file.

        Raises:
            PhaseTimeoutError: If the work does not end in time; says which line of code it has reached.
        """
        if self.is_bounding:
            return work()
        with self.waiting(phase):
            deadline = Deadline.after(self.timeout_s(phase))
            begun = Background(work, name=what)
            if not begun.ends(deadline):
                raise PhaseTimeoutError(
                    phase=phase,
                    awaited=Awaited(what),
                    waited_s=deadline.waited_s,
                    setting=timeout_setting(phase),
                    detail=where_is(begun.thread),
                )
            return begun.wait(deadline)

    def _bounded(
        self,
        phase: str,
        what: str,
        work: Callable[[], T],
        progress: Callable[[], object],
        limit_s: float,
        calls: Sequence[Any],
    ) -> T:
        standstill = Standstill()
        looks = self.looks(phase, what)

        def check() -> None:
            waited_s = standstill.seconds(progress())
            if waited_s >= limit_s:
                raise self.late(phase, what, waited_s, calls=calls)
            if phase in _SERVED:
                looks.check()

        def run() -> T:
            self._bounding.here = True
            return work()

        check()
        try:
            return Background(run, name=what).wait(Deadline.after(math.inf), on_tick=check)
        except ray.exceptions.RayError as error:
            if (blaming := self.blaming(what, error, calls)) is None:
                raise
            raise blaming from error

    def _raised_by_engine(self, phase: str, error: ray.exceptions.RayError) -> RankError | None:
        called = call_error_of(error)
        if called is None or called.foreign.is_about_others:
            return None
        ranks = {actor_id(party.actor): party.rank for party in self._parties() if party.rank.role is Role.ROLLOUT}
        return called.report(ranks[called.actor_id], phase) if called.actor_id in ranks else None

    def blaming(self, what: str, error: ray.exceptions.RayError, calls: Sequence[Any] = ()) -> RunError | None:
        """Returns an error that names the processes that do not answer, after a wait has failed; None if all answer.

        Args:
            what: The work that has failed.
            error: The error that Ray has raised.
            calls: As for `bounded`.
        """
        silent = [] if _names_missing(error) else self._silent(calls)
        if not silent:
            return None
        return RunError(f"{what}: {_told(silent)}; {last_line(error)}", culprit=_culprit(silent))

    def late(
        self, phase: str, what: str, waited_s: float, detail: str = "", calls: Sequence[Any] = ()
    ) -> PhaseTimeoutError:
        """Returns the error for a wait that has passed its deadline. Asks every process, to name those that are silent.

        With ``calls``, it asks no process; see `bounded`.
        """
        self.failed_in = phase
        silent = self._silent(calls)
        return PhaseTimeoutError(
            phase=phase,
            awaited=Awaited(what, frozenset(party.rank for party in self._parties())),
            missing=[one.party.rank for one in silent],
            waited_s=waited_s,
            setting=timeout_setting(phase),
            detail="; ".join(filter(None, (detail, _told(silent) or "every process that was asked answers"))),
        )

    def looks(self, phase: str, what: str) -> Looks:
        """Returns a `Looks` that checks for dead engines. The arguments are those of `check_alive`."""
        return Looks(lambda: self.check_alive(phase, what, roles={Role.ROLLOUT}))

    def check_alive(self, phase: str, what: str, *, roles: Collection[Role] = frozenset(Role)) -> None:
        """Raises if Ray's table of actors shows a dead process of the job. Asks no process. Takes milliseconds.

        Args:
            phase: The phase that the driver waits in.
            what: The work that it waits for.
            roles: Roles of the processes that count.

        Raises:
            RunError: If a process has died; names it.
        """
        if not (parties := [party for party in self._parties() if party.rank.role in roles]):
            return
        ended = {row["ActorID"] for row in actor_table() if row["State"] == DEAD}
        if dead := [Silent(party, is_dead=True) for party in parties if actor_id(party.actor) in ended]:
            self.failed_in = phase
            raise RunError(f"{what}: {_told(dead)}", culprit=_culprit(dead))

    def heard(self) -> list[RankError]:
        """Returns the errors that helpers got from their calls to ranks, newest first.

        Only ranks with a role in `ANSWERING` count.
        """
        parties = self._parties()
        asked = {
            getattr(party.actor, HEARD).remote(): party
            for party in parties
            if party.rank.role in HELPERS and getattr(party.actor, HEARD, None) is not None
        }
        if not asked:
            return []
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_HEARD_S)
        ranks = {actor_id(party.actor): party.rank for party in parties if party.rank.role in ANSWERING}
        found: list[RankError] = []
        for call in answered:
            try:
                told = ray.get(call)
            except ray.exceptions.RayError as error:
                logger.debug("%s answers with %s", asked[call].name, last_line(error))
                continue
            found += [one.report(ranks[one.actor_id], Phase.ROLLOUT) for one in told if one.actor_id in ranks]
        return sorted(found, key=lambda report: -report.raised_at)

    def _silent(self, calls: Sequence[Any]) -> list[Silent]:
        """Returns the processes that have not answered one of the calls; without calls, asks every process first.

        A process may have several calls.
        """
        parties = self._parties()
        by_actor = {actor_id(party.actor): party for party in parties} if calls else {}
        known = {call: by_actor[of] for call in calls if (of := actor_id_of_call(call)) in by_actor}
        asked = known if calls else {party.ask(): party for party in parties}
        if not asked:
            return []
        answered, late = ray.wait(list(asked), num_returns=len(asked), timeout=0 if calls else _ANSWER_S)
        found = [Silent(asked[call], is_dead=False) for call in late]
        for call in answered:
            try:
                ray.get(call)
            except ray.exceptions.RayActorError:
                found.append(Silent(asked[call], is_dead=True))
            except ray.exceptions.RayError as error:
                logger.debug("%s answers with %s", asked[call].name, last_line(error))
        return found


def _told(silent: Sequence[Silent]) -> str:
    return ", ".join(map(str, silent))


def _culprit(silent: Sequence[Silent]) -> RankId | None:
    """Returns the rank to blame for a failed call: a dead one, else an engine that does not answer, else None.

    A trainer that does not answer is not to blame: it may still be in the call, waiting for another rank.
    """
    dead = [one for one in silent if one.is_dead]
    engines = [one for one in silent if one.party.rank.role is Role.ROLLOUT]
    return next((one.party.rank for one in (*dead, *engines)), None)


def last_line(error: BaseException) -> str:
    """Returns the last line of an error's text; Ray puts the cause there."""
    return (str(error).splitlines() or [""])[-1]


def _names_missing(error: ray.exceptions.RayError) -> bool:
    """Returns True if a worker's error already names what it waits for, not just the rollout as a whole."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
    return isinstance(cause, PhaseTimeoutError) and bool(cause.missing or not cause.awaited.name.startswith(ROLLOUT))
