"""Who is to blame for a run that fails or hangs: from its processes, its store and what the host knows.

    ranks = [RankProcess(rank_id=trainer_id(0), pid=popen.pid, exit_code=popen.poll(), folder=folder), ...]
    diagnosis = diagnose(ranks, reports=control.reported_failures(), patience_s=10.0)
    print(diagnosis.verdict)

No driver and no Ray take part. Each rank has called `answering.answer_when_asked`; what one raised it has left in the
store by `ControlPlane.report_failure`. Both are optional: whoever has done neither is told of as far as the operating
system knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_safe_workers.diagnostics.flight_recorder import waiting_ranks, works_waited_in
from rl_safe_workers.diagnostics.hang import Wait, judge, keep, wait_of
from rl_safe_workers.diagnostics.inquiry import Answers, RankProcess, ask_ranks
from rl_safe_workers.diagnostics.stacks import CallFrame
from rl_safe_workers.errors import Cause, Died, RankError, RunError, Stopped
from rl_safe_workers.lifecycle import unix_now
from rl_safe_workers.ranks import RankId, trainer_ids
from rl_safe_workers.root_cause import root_cause

_NO_PHASE = "the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Who is to blame, and where each rank is.

    Example: ``Diagnosis(verdict="trainer rank 1 was killed by SIGKILL, ...", culprits={trainer_id(1)}, ...)``
    """

    verdict: str
    """One line."""
    culprits: frozenset[RankId]
    """Ranks that the failure began with; empty if none is known."""
    error: RunError | None
    """The root of what ranks have reported and of what became of their processes; None if nothing has failed."""
    ranks: Mapping[RankId, str]
    """What each rank does or has failed with, and at which line of code: the end of a sentence about it."""


def diagnose(
    ranks: Sequence[RankProcess],
    *,
    patience_s: float,
    reports: Mapping[RankId, RunError] | None = None,
    evidence: Path | None = None,
    call_frame: CallFrame | None = None,
) -> Diagnosis:
    """Finds the ranks that a failure or a hang began with. Call it before the processes are ended.

    Args:
        ranks: The run's processes on this machine. What they answer is filled in.
        patience_s: Longest wait for their answers, in seconds.
        reports: What ranks have failed with, as they or the host say; e.g. ``control.reported_failures()``.
        evidence: Folder that gets ``verdict.json``, stacks and Flight Recorder files; None: nothing is written.
        call_frame: Where the host's calls run; None if the main thread is always at work, as in a script.

    Raises:
        OSError: If the evidence cannot be written.
    """
    answers = ask_ranks(lambda: ranks, patience_s=patience_s, call_frame=call_frame)
    known = {**_failures_of_processes(answers.ranks), **(reports or {})}
    waiting = _waiting(answers)
    busy = {one.rank_id for one in answers.ranks if not one.is_gone} - known.keys() - waiting
    root = root_cause(known, pending=busy) if known else None
    states = {one.rank_id: _state(one, known.get(one.rank_id)) for one in answers.ranks}
    error = None if root is None else root.error
    wait = _seen_wait(answers, waiting, busy) if error is None else wait_of(error)
    found: dict[str, Any] = {"verdict": "no rank has failed, and no rank waits for others"}
    culprits = frozenset[RankId]()
    if wait is not None:
        hang, found = judge(error, wait, answers, evidence)
        culprits = hang.culprits or wait.missing or frozenset(busy - wait.arrived)
    elif root is not None:
        culprits = root.culprits
        # Where the culprit itself has said nothing, another rank repeats what it has heard.
        said = "" if any(one in known for one in culprits) else f"; {root.error}"
        names = "; ".join(f"{one} {states.get(one, 'is unknown here')}" for one in sorted(culprits))
        found = {"verdict": f"{names}{said}", "error": f"{type(error).__name__}: {error}"}
    if evidence is not None:
        keep(answers, {**found, "ranks": {str(one): state for one, state in states.items()}}, evidence)
    return Diagnosis(verdict=found["verdict"], culprits=culprits, error=error, ranks=states)


def _failures_of_processes(ranks: Sequence[RankProcess]) -> dict[RankId, RankError]:
    """Returns the failure of each process that has ended badly or is stopped."""

    def failure(one: RankProcess, cause: Cause) -> RankError:
        return RankError(
            rank_id=one.rank_id, phase=_NO_PHASE, cause=cause, text=one.where(), trace="", raised_at=unix_now(),
            place=one.last_place,
        )  # fmt: skip

    ended = {one.rank_id: failure(one, Died()) for one in ranks if one.is_gone and one.exit_code != 0}
    return ended | {one.rank_id: failure(one, Stopped()) for one in ranks if one.is_stopped}


def _waiting(answers: Answers) -> set[RankId]:
    """Returns the ranks that wait for others, over the store or in a collective."""
    in_collectives = waiting_ranks(works_waited_in(answers.records, ()))
    return {one.rank_id for one in answers.ranks if one.waits_for_others}.union(trainer_ids(in_collectives))


def _seen_wait(answers: Answers, waiting: Collection[RankId], busy: Collection[RankId]) -> Wait | None:
    """Returns who waits for whom, as far as the processes show it; None if nobody waits."""
    if not waiting:
        return None
    ended = {one.rank_id for one in answers.ranks if one.is_gone}
    roles = sorted({f"the {one.role}s" for one in (*waiting, *busy, *ended)}, reverse=True)
    return Wait(
        phase=None, group=" and ".join(roles), arrived=frozenset(waiting), missing=frozenset(busy) or frozenset(ended),
        waited_s=None,
    )  # fmt: skip


def _state(one: RankProcess, report: RunError | None) -> str:
    """Returns the end of a sentence about a rank: what it has failed with, else where it is."""
    if not isinstance(report, RankError) or isinstance(report.cause, Died):
        return one.where()
    if isinstance(report.cause, Stopped):
        if one.stack is not None and one.stack.place is not None:
            return f"is stopped at {one.stack.place}"
        return "is stopped" if one.last_place is None else f"is stopped, last seen at {one.last_place}"
    return f"failed in phase {report.phase} at {report.place or 'an unknown line'}: {report.text}"
