"""Finds the one failure that all others follow from, in the reports of the ranks.

Functions over typed facts. No message of ours is looked at.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rl_safe_workers.errors import (
    Cause,
    Died,
    PhaseTimeoutError,
    Raised,
    RankError,
    Repeats,
    RlSafeError,
    RunError,
    Stopped,
    Victim,
    foreign_cause,
)
from rl_safe_workers.frames import place_of
from rl_safe_workers.lifecycle import unix_now
from rl_safe_workers.ranks import RankId


@dataclass(frozen=True, slots=True)
class RootCause:
    """The failure that a run's other failures follow from.

    Example: ``RootCause(error, culprits=frozenset({trainer_id(1)}), is_told=True)``
    """

    error: RunError
    """The root's report or, where the root has reported nothing, the best account of it."""
    culprits: frozenset[RankId]
    """Ranks that the failure began with; empty if nobody knows."""
    is_told: bool
    """True if the error is about the culprits; if not, it only waited for them, who have reported nothing."""


def cause_of(error: Exception, rank_id: RankId) -> Cause:
    """Tells how a rank came to raise an error.

    Args:
        error: What it raised.
        rank_id: The rank.
    """
    if foreign_cause(error).is_about_others:
        return Victim()
    culprit = error.culprit if isinstance(error, RlSafeError) else None
    return Raised() if culprit is None or culprit == rank_id else Repeats(culprit)


def report_of(error: Exception, rank_id: RankId, phase: str) -> PhaseTimeoutError | RankError:
    """Returns what a rank reports of an error that it has caught.

    Args:
        error: What was raised.
        rank_id: The rank.
        phase: The phase that the rank was in.

    Returns:
        A RankError with the line of code; or the PhaseTimeoutError as it was, which names the ranks that are missing.
    """
    if isinstance(error, PhaseTimeoutError):
        return error
    raised_at = unix_now()  # before the trace, which takes a while
    return RankError(
        rank_id=rank_id,
        phase=phase,
        cause=cause_of(error, rank_id),
        text=f"{type(error).__name__}: {error}",
        trace="".join(traceback.format_exception(error)),
        raised_at=raised_at,
        place=place_of(error),
    )


def root_cause(reports: Mapping[RankId, RunError], *, pending: Collection[RankId] = ()) -> RootCause:
    """Finds what the failures of several ranks follow from.

    In this order, and of several the earliest: a rank that died; one that raised; one that was stopped; one that
    repeats the failure of a rank of which nothing else is known; a phase's deadline, by the report that names missing
    ranks which have reported no wait of their own; and a rank whose wait failed, for those that are pending still.

    Args:
        reports: What each rank has failed with, at least one: a RankError of its own, or the PhaseTimeoutError that it
            raised. An error of any other class counts as raised at an unknown time.
        pending: Ranks that have not answered yet.
    """
    assert reports, "nothing has failed"
    victims = frozenset(rank_id for rank_id, error in reports.items() if _only_waited(error))

    def likelihood(item: tuple[RankId, RunError]) -> tuple[int, int, float, RankId]:
        """Sorts the root before its consequences."""
        rank_id, error = item
        at_s = error.raised_at if isinstance(error, RankError) else 0.0
        match error:
            # A missing rank that has reported a wait of its own did not come because of that.
            case PhaseTimeoutError(missing=missing) if missing - victims:
                return 4, len(missing & victims), at_s, rank_id
            case PhaseTimeoutError():
                return 6, 0, at_s, rank_id
            case RankError(cause=Died()):
                return 0, 0, at_s, rank_id
            case RankError(cause=Stopped()):
                return 2, 0, at_s, rank_id
            case RankError(cause=Repeats(of=root)) if root not in victims:
                return 3, 0, at_s, rank_id
            case RankError(cause=Victim()):
                return 5, 0, at_s, rank_id
            case RankError(cause=Repeats()):
                return 7, 0, at_s, rank_id
        return 1, 0, at_s, rank_id

    rank_id, error = min(reports.items(), key=likelihood)
    match error:
        case PhaseTimeoutError(missing=missing) if missing - victims:
            return RootCause(error, culprits=missing - victims, is_told=True)
        case RankError(cause=Repeats(of=root)) if root not in victims:
            return RootCause(error, culprits=frozenset({root}), is_told=True)
        case PhaseTimeoutError() | RankError(cause=Victim() | Repeats()):
            return RootCause(error, culprits=frozenset(pending), is_told=False)
    return RootCause(error, culprits=frozenset({rank_id}), is_told=True)


def _only_waited(error: RunError) -> bool:
    return isinstance(error, PhaseTimeoutError) or (isinstance(error, RankError) and isinstance(error.cause, Victim))
