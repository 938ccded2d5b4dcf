"""Finds the root cause of a failed run: the failure that all others follow from, given the reports of all ranks.

The functions use typed facts only. They do not read the text of our own messages.
"""

from __future__ import annotations

import json
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
    during,
    foreign_cause,
)
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.frames import collective_that_raised, place_of
from rl_safe_workers.lifecycle import Phase, unix_now
from rl_safe_workers.ranks import RankId


@dataclass(frozen=True, slots=True)
class RootCause:
    """The failure that a run's other failures follow from.

    Example: ``RootCause(error, culprits=frozenset({trainer_id(1)}), is_told=True)``
    """

    error: RunError
    """The report of the root cause itself or, if its rank has reported nothing, the most informative other report."""
    culprits: frozenset[RankId]
    """Ranks that the failure began with; empty if unknown."""
    is_told: bool
    """True if the error is about the culprits. False if it only reports a wait for them; they reported nothing."""


_BETWEEN_TWO = frozenset(
    {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"}
)
"""Operations of torch whose two sides are usually at different lines."""
STORE_BARRIER = "a barrier over the store"
"""The collective of a rank that waits for others in our control plane."""
ITS_END = "its end"
"""Stands for the collective of a rank that has ended well."""
WITH_A_ROOT = frozenset({"broadcast", "broadcast_object_list", "gather", "gather_object", "scatter", "reduce"})
"""Collectives that one rank often calls at a line of its own."""


@dataclass(frozen=True, slots=True)
class Spot:
    """The line at which a rank waits for others, and the collective that it is in.

    Example: ``str(Spot("train", "all_reduce", "train.py:12 (step)"))`` is ``"in phase train in all_reduce at
    train.py:12 (step)"``.
    """

    phase: str
    op: str | None
    """A collective of torch, or `STORE_BARRIER`; None if unknown."""
    place: str | None
    """The line of code; None if unknown."""

    def __str__(self) -> str:
        op = "" if self.op is None else f" in {self.op}"
        known = [f" at {self.place}"] if self.place is not None else [] if op else [" at an unknown line"]
        return "".join([during(self.phase), op, *known])


def spot_of(report: RunError) -> Spot | None:
    """Returns the place of a rank that has given up, from its report; None if the report does not tell."""
    match report:
        case RankError():
            return Spot(report.phase, report.op, report.place)
        case PhaseTimeoutError():
            return Spot(report.phase, STORE_BARRIER, None)
    return None


def odd_ones(spots: Mapping[RankId, Spot]) -> frozenset[RankId]:
    """Returns the ranks that wait in another collective than most, or at another line of code.

    Returns an empty set if the difference may be harmless: a collective is not known, there are more than two places,
    or the two sides of the operation are usually at different lines. If only some ranks are in teardown, these count
    as one place.

    Args:
        spots: Where each rank of a group waits. No rank is missing.
    """
    if are_at_the_end(spots) not in (frozenset(), spots.keys()):
        at_the_end = Spot(Phase.TEARDOWN, STORE_BARRIER, None)
        spots = {one: at_the_end if spot.phase == Phase.TEARDOWN else spot for one, spot in spots.items()}
    sides: dict[Spot, set[RankId]] = {}
    for rank_id, spot in spots.items():
        sides.setdefault(spot, set()).add(rank_id)
    ops = {spot.op for spot in sides}
    if len(sides) != 2 or None in ops or ops & _BETWEEN_TWO or (len(ops) == 1 and ops & WITH_A_ROOT):
        return frozenset()
    fewer, more = sorted(sides.values(), key=len)
    return frozenset(fewer) if len(fewer) < len(more) else frozenset()


def are_at_the_end(spots: Mapping[RankId, Spot]) -> frozenset[RankId]:
    """Returns the ranks that are in teardown, or have ended."""
    return frozenset(rank_id for rank_id, spot in spots.items() if spot.phase == Phase.TEARDOWN)


def cause_of(error: Exception, rank_id: RankId) -> Cause:
    """Returns the reason why a rank raised an error.

    Args:
        error: The error that it raised.
        rank_id: The rank.
    """
    if foreign_cause(error).is_about_others:
        return Victim()
    culprit = error.culprit if isinstance(error, RlSafeError) else None
    return Raised() if culprit is None or culprit == rank_id else Repeats(culprit)


def report_of(error: Exception, rank_id: RankId, phase: str) -> PhaseTimeoutError | RankError:
    """Returns the report of a rank about an error that it has caught.

    Args:
        error: The error that was caught.
        rank_id: The rank.
        phase: The phase that the rank was in.

    Returns:
        A RankError with the line of code. A PhaseTimeoutError is returned unchanged: it already names the missing
        ranks.
    """
    if isinstance(error, PhaseTimeoutError):
        return error
    foreign = foreign_cause(error)
    raised_at = unix_now()  # before the trace is formatted, which takes a while
    return RankError(
        rank_id=rank_id,
        phase=phase,
        cause=cause_of(error, rank_id),
        text=f"{type(error).__name__}: {error}",
        trace="".join(traceback.format_exception(error)),
        raised_at=raised_at,
        place=place_of(error),
        foreign=ForeignCause.UNKNOWN if foreign.is_about_others else foreign,
        op=collective_that_raised(error),
    )


def report_to_text(report: PhaseTimeoutError | RankError) -> str:
    """Returns a rank's report as one line, for `report_from_text`."""
    kind = "late" if isinstance(report, PhaseTimeoutError) else "failed"
    return json.dumps({kind: report.as_json()})


def report_from_text(text: str | bytes) -> PhaseTimeoutError | RankError:
    """Reads the report of another rank.

    Raises:
        ValueError: If the text is not a report.
    """
    try:
        ((kind, fields),) = json.loads(text).items()
        return (PhaseTimeoutError if kind == "late" else RankError).from_json(fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no report of a rank: {error}") from error


def root_cause(reports: Mapping[RankId, RunError], *, pending: Collection[RankId] = ()) -> RootCause:
    """Finds the failure that all other failures follow from.

    The kind that comes first in this list wins. Among several failures of one kind, the earliest wins:

    1. A rank died.
    2. A rank raised an error of its own.
    3. A rank was stopped.
    4. A rank repeats the failure of another rank, and that rank has reported no wait.
    5. A phase passed its deadline, and the report names missing ranks that have reported no wait.
    6. A rank gave up waiting. The culprits are the ranks that are still pending.

    Args:
        reports: The error of each rank that failed, at least one: a RankError of its own, or the PhaseTimeoutError that
            it raised. An error of any other class counts as a rank's own error, raised at an unknown time.
        pending: Ranks that have not answered yet.
    """
    assert reports, "nothing has failed"
    victims = frozenset(rank_id for rank_id, error in reports.items() if only_waited(rank_id, error))

    def likelihood(item: tuple[RankId, RunError]) -> tuple[int, int, float, RankId]:
        """Returns the sort key, which puts the root before its consequences."""
        rank_id, error = item
        at_s = error.raised_at if isinstance(error, RankError) else 0.0
        match error:
            # A missing rank that has reported a wait did not arrive because of that wait.
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


def only_waited(rank_id: RankId, error: RunError) -> bool:
    """Returns True if a rank failed only because it waited for others."""
    if isinstance(error, PhaseTimeoutError):
        return rank_id not in error.missing  # a rank that names itself only repeats the others' report
    return isinstance(error, RankError) and isinstance(error.cause, Victim)
