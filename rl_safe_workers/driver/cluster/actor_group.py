"""Calls many actors at once under one deadline, and names the culprit if a call fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from rl_safe_workers.compat.ray_tables import DEAD, actor_state, actor_table
from rl_safe_workers.control.deadline import Deadline, DeadlineExceededError, run_bounded
from rl_safe_workers.driver.cluster.actors import Reply
from rl_safe_workers.driver.cluster.interrupts import SLICE_S
from rl_safe_workers.driver.cluster.nodes import Node
from rl_safe_workers.errors import Awaited, ClusterError, Died, PhaseTimeoutError, RankError, RunError, in_one_line
from rl_safe_workers.lifecycle import Phase, PhaseEvent, unix_now
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.root_cause import root_cause
from rl_safe_workers.setting_names import timeout_setting

ANSWERS = timedelta(seconds=10)
"""Longest wait for Ray's directory, which answers in milliseconds."""
SLACK_S = 5.0
"""Seconds that the driver waits longer than the ranks. A rank that misses another can name it; the driver cannot."""
WITHOUT_DEADLINE = frozenset(
    {
        (Phase.START, Role.TRAINER),
        (Phase.START, Role.ROLLOUT),
        (Phase.ROLLOUT, Role.ROLLOUT),
        (Phase.TEARDOWN, Role.ROLLOUT),
    }
)
"""Phases and roles in which ranks keep no deadline of their own. The driver does not wait ``SLACK_S`` for them."""
GRACE_S = 2.0
"""Seconds to collect more replies after the first failure. The death of a rank is often reported after its victims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRef:
    """One actor of the run."""

    role: Role
    rank: int
    handle: Any
    node: Node | None = None
    """The actor's node; None if unknown."""

    @property
    def rank_id(self) -> RankId:
        """The actor's role and rank."""
        return RankId(self.role, self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCalls:
    """Calls in progress, all in one phase; `gather` waits for them."""

    phase: Phase
    started_s: float
    refs: dict[Any, ActorRef] = field(default_factory=dict)
    replies: dict[Any, Reply] = field(default_factory=dict)
    """Answers that have come: a wait that was given up can be taken up again."""

    def joined_with(self, other: PendingCalls) -> PendingCalls:
        """Returns the calls of both, as one wait in the phase of ``self``."""
        return PendingCalls(
            phase=self.phase,
            started_s=min(self.started_s, other.started_s),
            refs={**self.refs, **other.refs},
            replies={**self.replies, **other.replies},
        )

    def without(self, ranks: Collection[RankId]) -> PendingCalls:
        """Returns the calls of all other ranks."""
        refs = {ref: actor for ref, actor in self.refs.items() if actor.rank_id not in ranks}
        return replace(self, refs=refs, replies={ref: reply for ref, reply in self.replies.items() if ref in refs})

    @property
    def unanswered(self) -> list[Any]:
        """References of the calls whose answers have not been taken."""
        return [ref for ref in self.refs if ref not in self.replies]

    @property
    def is_answered(self) -> bool:
        """True if all answers are there to be taken. Does not wait."""
        refs = self.unanswered
        return not refs or not ray.wait(refs, num_returns=len(refs), timeout=0)[1]


def start_calls(
    actors: Sequence[ActorRef], phase: Phase, method: str, arguments: Callable[[int], tuple[Any, ...]]
) -> PendingCalls:
    """Starts a method on every actor at once.

    Args:
        actors: The actors to call.
        phase: The phase, for timeouts and errors.
        method: Name of the worker's method.
        arguments: Function from an actor's rank to the method's arguments.

    Raises:
        RunError: If this process has left Ray, as after ``ray.shutdown()`` in a reward function. A call would then
            start another Ray.
    """
    if not ray.is_initialized():
        raise RunError(
            f"phase {phase}: this process has left Ray: code that runs in the driver, such as a reward function, has "
            "called ray.shutdown(); remove that call"
        )
    started_s = time.monotonic()
    refs = {actor.handle.call.remote(str(phase), method, arguments(actor.rank)): actor for actor in actors}
    return PendingCalls(phase=phase, started_s=started_s, refs=refs)


def gather(
    calls: PendingCalls,
    *,
    timeout_s: float,
    on_events: Callable[[list[PhaseEvent]], None],
    check: Callable[[], None],
    hears_all: bool = False,
) -> list[Any]:
    """Waits for calls and returns their values in the order they were started.

    Args:
        calls: The result of `start_calls`.
        timeout_s: Seconds from the start of the calls, for all calls together. If ranks keep the deadline themselves,
            the driver waits ``SLACK_S`` longer.
        on_events: Receives the phase events that the replies carry.
        check: Called several times a second. An exception that it raises ends the wait.
        hears_all: True to wait for the other ranks' answers after one has failed, so that the same ranks can be called
            again. After the death of a trainer, the wait ends early all the same.

    Raises:
        RankError: The root cause, if a rank fails. The wait then ends after at most ``GRACE_S``, if not ``hears_all``.
        PhaseTimeoutError: If ranks gave up waiting for other ranks, or did not answer in time. It names the missing
            ranks.
    """
    pending, replies = calls.unanswered, calls.replies
    while pending:
        check()
        keeps_time = any((calls.phase, calls.refs[ref].role) not in WITHOUT_DEADLINE for ref in pending)
        # One last look after the deadline: replies that were ready while the driver was busy count as in time.
        is_over = time.monotonic() >= calls.started_s + timeout_s + (SLACK_S if keeps_time else 0.0)
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=0 if is_over else SLICE_S)
        _take(calls, done, on_events)
        has_failed = any(reply.error for reply in replies.values())
        if has_failed and not (hears_all and pending and not is_over and not _has_lost_a_trainer(calls)):
            raise _root_error(calls, pending, on_events, grace_s=0.0 if hears_all else GRACE_S)
        if pending and is_over:
            raise _timeout(calls, _ids(calls, pending), time.monotonic() - calls.started_s)
    return [replies[ref].value for ref in calls.refs]


def _take(calls: PendingCalls, done: Iterable[Any], on_events: Callable[[list[PhaseEvent]], None]) -> None:
    for ref in done:
        calls.replies[ref] = reply = _fetch(calls, ref)
        on_events(reply.events)


def _fetch(calls: PendingCalls, ref: Any) -> Reply:
    try:
        reply: Reply = ray.get(ref)
    except RayActorError as error:
        return Reply(error=died(calls.refs[ref], calls.phase, trace=str(error)))
    except RayError as error:
        return Reply(error=died(calls.refs[ref], calls.phase, text=in_one_line(error), trace=str(error)))
    return reply


def is_dead(actor: ActorRef) -> bool:
    """Returns True if Ray's directory says that an actor has ended.

    Raises:
        ClusterError: If Ray does not answer within `ANSWERS_S`.
    """
    # From Ray's tables, because Ray's public function needs the dashboard. Without Ray's control store this waits until
    # Ray kills the driver, after a minute.
    actor_id = actor.handle._actor_id.hex()
    try:
        return run_bounded(lambda: actor_state(actor_id), Deadline.after(ANSWERS), name="asking Ray") == DEAD
    except DeadlineExceededError:
        raise ClusterError(
            f"Ray's control store has not answered for {ANSWERS.total_seconds():.0f} s: its process gcs_server on the "
            "head node has died or is stopped; look there for an OOM kill, and at the end of gcs_server.out"
        ) from None


def listed_actors() -> list[dict[str, Any]]:
    """Returns Ray's list of this driver's actors as values for JSON. Needs no dashboard."""
    if not ray.is_initialized():
        return []
    job = ray.get_runtime_context().get_job_id()
    return [
        {
            "class": actor["ActorClassName"],
            "state": actor["State"],
            "pid": actor["Pid"],
            "address": actor["Address"]["IPAddress"],
            "node_id": actor["Address"]["NodeID"],
        }
        for actor in actor_table()
        if actor["JobID"] == job
    ]


def died(actor: ActorRef, phase: Phase, *, text: str = "the process died", trace: str = "") -> RankError:
    """Returns the error for an actor that has died."""
    if actor.node is not None and not actor.node.is_loopback:
        text = f"{text} on node {actor.node}"
    return RankError(rank_id=actor.rank_id, phase=phase, cause=Died(), text=text, trace=trace, raised_at=unix_now())


def _timeout(calls: PendingCalls, missing: Collection[RankId], waited_s: float, detail: str = "") -> PhaseTimeoutError:
    """Returns the error for ranks that have not answered. It counts only ranks of the missing roles as awaited."""
    roles = {one.role for one in missing}
    members = frozenset(actor.rank_id for actor in calls.refs.values() if actor.role in roles)
    return PhaseTimeoutError(
        phase=calls.phase,
        awaited=Awaited(f"the {next(iter(roles))}s" if len(roles) == 1 else "the run", members),
        missing=missing,
        waited_s=waited_s,
        setting=timeout_setting(calls.phase),
        detail=detail,
    )


def _ids(calls: PendingCalls, refs: Iterable[Any]) -> frozenset[RankId]:
    return frozenset(calls.refs[ref].rank_id for ref in refs)


def _root_error(
    calls: PendingCalls, pending: list[Any], on_events: Callable[[list[PhaseEvent]], None], *, grace_s: float
) -> RunError:
    """Collects replies for ``grace_s`` more seconds, then returns the root cause."""
    deadline, replies = time.monotonic() + grace_s, calls.replies
    while pending and (left := deadline - time.monotonic()) > 0 and not any(map(_has_died, replies.values())):
        done, pending = ray.wait(pending, timeout=left)
        _take(calls, done, on_events)
    reports = {calls.refs[ref].rank_id: reply.error for ref, reply in replies.items() if reply.error is not None}
    root = root_cause(reports, pending=_ids(calls, pending))
    if root.culprits and not root.is_told:
        # Every rank that failed only waited for ranks that have not answered yet.
        return _timeout(calls, root.culprits, time.monotonic() - calls.started_s, detail=str(root.error))
    return root.error


def _has_lost_a_trainer(calls: PendingCalls) -> bool:
    return any(_has_died(reply) and calls.refs[ref].role is Role.TRAINER for ref, reply in calls.replies.items())


def _has_died(reply: Reply) -> bool:
    return isinstance(reply.error, RankError) and isinstance(reply.error.cause, Died)
