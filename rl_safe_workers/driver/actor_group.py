"""Calls to many actors at once, with one deadline, and the culprit named when one of them fails."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from rl_safe_workers.driver.actors import Reply
from rl_safe_workers.driver.interrupts import SLICE_S
from rl_safe_workers.driver.nodes import Node
from rl_safe_workers.errors import PhaseTimeoutError, RankError, RunError, first_line
from rl_safe_workers.lifecycle import Phase, PhaseEvent
from rl_safe_workers.ranks import Role

SLACK_S = 5.0
"""How much longer than its ranks the driver waits: a rank that notices a missing one can name it, the driver cannot."""
WITHOUT_DEADLINE = frozenset(
    {
        (Phase.START, Role.TRAINER),
        (Phase.START, Role.ROLLOUT),
        (Phase.ROLLOUT, Role.ROLLOUT),
        (Phase.TEARDOWN, Role.ROLLOUT),
    }
)
"""Where ranks look at no clock, so that there is nothing to wait longer for."""
NOR = "nor "
"""Begins what a timeout says of missing ranks that have another role."""
GRACE_S = 2.0
"""How long to go on listening after the first failure: a dead rank is often reported after those it took along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorRef:
    """One actor of the run."""

    role: Role
    rank: int
    handle: Any
    node: Node | None = None
    """Where it is, if that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCalls:
    """Calls under way in one phase; `gather` waits for them."""

    phase: Phase
    started_s: float
    refs: dict[Any, ActorRef] = field(default_factory=dict)

    def joined_with(self, other: PendingCalls) -> PendingCalls:
        """The calls of both, as one wait of this one's phase."""
        return PendingCalls(
            phase=self.phase, started_s=min(self.started_s, other.started_s), refs={**self.refs, **other.refs}
        )


def start_calls(
    actors: Sequence[ActorRef], phase: Phase, method: str, arguments: Callable[[int], tuple[Any, ...]]
) -> PendingCalls:
    """Starts a method on every actor at once.

    Args:
        actors: Whom to call.
        phase: The phase, for timeouts and errors.
        method: The worker's method.
        arguments: The method's arguments, by rank.
    """
    started_s = time.monotonic()
    refs = {actor.handle.call.remote(str(phase), method, arguments(actor.rank)): actor for actor in actors}
    return PendingCalls(phase=phase, started_s=started_s, refs=refs)


def gather(
    calls: PendingCalls,
    *,
    timeout_s: float,
    on_events: Callable[[list[PhaseEvent]], None],
    check: Callable[[], None],
) -> list[Any]:
    """Waits for calls and returns their values in the order they were started.

    Args:
        calls: What `start_calls` returned.
        timeout_s: Seconds from their start; covers all of them. For ranks that keep the deadline themselves the driver
            waits ``SLACK_S`` longer.
        on_events: Takes the phase events that the replies carry.
        check: Called several times a second; what it raises ends the wait.

    Raises:
        RankError: The failure that came first, when any rank fails. Others are not waited for.
        PhaseTimeoutError: If ranks waited in vain for another, or have not answered in time; names the missing.
    """
    pending = list(calls.refs)
    replies: dict[Any, Reply] = {}
    while pending:
        check()
        keeps_time = any((calls.phase, calls.refs[ref].role) not in WITHOUT_DEADLINE for ref in pending)
        # One last look after the deadline: replies that lay ready while the driver did something else are in time.
        is_over = time.monotonic() >= calls.started_s + timeout_s + (SLACK_S if keeps_time else 0.0)
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=0 if is_over else SLICE_S)
        replies |= {ref: _fetch(calls, ref) for ref in done}
        for ref in done:
            on_events(replies[ref].events)
        if any(reply.error for reply in replies.values()):
            raise _culprit(calls, replies, pending, on_events)
        if pending and is_over:
            raise _timeout(calls, pending, time.monotonic() - calls.started_s)
    return [replies[ref].value for ref in calls.refs]


def _fetch(calls: PendingCalls, ref: Any) -> Reply:
    try:
        reply: Reply = ray.get(ref)
    except RayActorError as error:
        return Reply(error=died(calls.refs[ref], calls.phase, trace=str(error)))
    except RayError as error:
        cause = f"{type(error).__name__}: {first_line(error)}"
        return Reply(error=died(calls.refs[ref], calls.phase, cause=cause, trace=str(error)))
    return reply


def died(actor: ActorRef, phase: Phase, *, cause: str = "the process died", trace: str = "") -> RankError:
    """The error of an actor that is no more."""
    if actor.node is not None and not actor.node.is_loopback:
        cause = f"{cause} on node {actor.node}"
    return RankError(
        role=actor.role, rank=actor.rank, phase=phase, cause=cause, trace=trace,
        # Whatever took the process away is the cause of what others report, however late it is noticed.
        raised_at=0.0,
    )  # fmt: skip


def _timeout(calls: PendingCalls, pending: Sequence[Any], waited_s: float, detail: str = "") -> PhaseTimeoutError:
    missing = [calls.refs[ref] for ref in pending]
    role = min((actor.role for actor in missing), key=[Role.TRAINER, Role.ROLLOUT].index)
    others = [f"{actor.role} rank {actor.rank}" for actor in missing if actor.role is not role]
    return PhaseTimeoutError(
        phase=calls.phase,
        group=f"the {role}s",
        missing=[actor.rank for actor in missing if actor.role is role],
        waited_s=waited_s,
        setting=f"rl_safe.timeouts.{calls.phase}",
        detail="; ".join([*([NOR + ", ".join(others)] if others else []), *([detail] if detail else [])]),
    )


def _blame(error: RunError) -> tuple[bool, bool, float]:
    """Sorts errors by how likely they are the cause: those that waited in vain last, else the earliest first.

    Before them what a rank has failed with itself, and not only heard of.
    """
    if isinstance(error, RankError):
        return error.in_vain, error.follows, error.raised_at
    return True, True, math.inf


def _culprit(
    calls: PendingCalls, replies: dict[Any, Reply], pending: list[Any], on_events: Callable[[list[PhaseEvent]], None]
) -> RunError:
    """Listens a little longer, then picks the error that others follow from."""
    deadline = time.monotonic() + GRACE_S
    while pending and (left := deadline - time.monotonic()) > 0 and not any(map(_has_died, replies.values())):
        done, pending = ray.wait(pending, timeout=left)
        late = {ref: _fetch(calls, ref) for ref in done}
        for reply in late.values():
            on_events(reply.events)
        replies = {**replies, **late}
    error = min((reply.error for reply in replies.values() if reply.error is not None), key=_blame)
    names_someone = isinstance(error, PhaseTimeoutError) and error.missing
    if _blame(error)[0] and pending and not names_someone:
        # All that failed waited for those that are still busy with whatever keeps them.
        return _timeout(calls, pending, time.monotonic() - calls.started_s, detail=str(error))
    return error


def _has_died(reply: Reply) -> bool:
    return isinstance(reply.error, RankError) and reply.error.raised_at == 0
