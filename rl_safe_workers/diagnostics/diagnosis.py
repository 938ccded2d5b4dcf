"""Names the rank to blame for a run that fails or hangs: from its processes, its store and the host's knowledge.

    ranks = [RankProcess(rank_id=trainer_id(0), pid=popen.pid, poll=popen.poll, folder=folder), ...]
    diagnosis = diagnose(ranks, reports=control.reported_failures, patience_s=10.0)
    print(diagnosis.verdict)

No driver and no Ray take part. Each rank has called `answering.answer_when_asked`, and has left its failure in the
store by `ControlPlane.report_failure`. Of a rank that does neither, the verdict says only what the operating system
knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGABRT
from typing import Any

from rl_safe_workers.control.deadline import attempt
from rl_safe_workers.diagnostics.answering import PLACE_EVERY_S, last_noted_s
from rl_safe_workers.diagnostics.hang import Wait, judge, keep, wait_of, waiting_for_others
from rl_safe_workers.diagnostics.inquiry import Answers, RankProcess, ask_ranks
from rl_safe_workers.diagnostics.stacks import CallFrame
from rl_safe_workers.errors import Cause, Died, Raised, RankError, RunError, Stopped, first_line
from rl_safe_workers.lifecycle import unix_now
from rl_safe_workers.ranks import RankId
from rl_safe_workers.root_cause import root_cause

Reports = Mapping[RankId, RunError]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The rank to blame, and the place of each rank.

    Example: ``Diagnosis(verdict="trainer rank 1 was killed by SIGKILL, ...", culprits={trainer_id(1)}, ...)``
    """

    verdict: str
    """One line."""
    culprits: frozenset[RankId]
    """Ranks that the failure began with; empty if none is known."""
    error: RunError | None
    """The root of what ranks have reported and of what became of their processes; None if nothing has failed."""
    ranks: Mapping[RankId, str]
    """Each rank's action or failure, with its line of code: the end of a sentence about it."""


def diagnose(
    ranks: Sequence[RankProcess],
    *,
    patience_s: float,
    reports: Reports | Callable[[], Reports] | None = None,
    evidence: Path | None = None,
    call_frame: CallFrame | None = None,
) -> Diagnosis:
    """Finds the ranks that a failure or a hang began with. Call it before the processes are ended. Never raises.

    Args:
        ranks: The run's processes on this machine.
        patience_s: Longest wait, in seconds, for each of: the reports, the processes' answers, the evidence.
        reports: What ranks have failed with, as they or the host say; or a function that returns it, such as
            ``control.reported_failures``, which may hang with the store.
        evidence: Folder that gets ``verdict.json``, stacks and Flight Recorder files; None: nothing is written.
        call_frame: Where the host's calls run; None: the main thread counts, as in a script.
    """
    reported: dict[RankId, RunError] = {}
    attempt(
        "reading the ranks' reports",
        lambda: reported.update(reports() if callable(reports) else reports or {}),
        timeout_s=patience_s,
    )
    answers = ask_ranks(lambda: ranks, patience_s=patience_s, call_frame=call_frame)
    known = {**_failures_of_processes(answers.ranks), **reported}
    waiting = waiting_for_others(answers)
    busy = {one.rank_id for one in answers.ranks if not one.is_gone} - known.keys() - waiting
    root = root_cause(known, pending=busy) if known else None
    error = None if root is None else root.error
    states = {one.rank_id: _state(one, reported.get(one.rank_id)) for one in answers.ranks}
    wait = _seen_wait(answers, waiting, busy) if error is None else wait_of(error)
    found: dict[str, Any] = {"verdict": "no rank has failed, and no rank waits for others"}
    culprits = frozenset[RankId]()
    if wait is not None:
        if root is not None and wait.missing is not None:
            # Of the ranks that the error names, some wait themselves.
            missing = (root.culprits - waiting) or root.culprits or wait.missing
            wait = replace(wait, missing=missing, arrived=wait.arrived | (wait.missing - missing))
        hang, found = judge(error, wait, answers, evidence)
        culprits = hang.culprits or wait.missing or frozenset(busy - wait.arrived)
    elif root is not None:
        culprits = root.culprits
        # Where no culprit has said anything itself, another rank repeats what it has heard.
        said = [] if any(one in known for one in culprits) else [first_line(root.error)]
        names = [f"{one} {states.get(one, 'is unknown here')}" for one in sorted(culprits)]
        found = {"verdict": "; ".join([*names, *said]), "error": f"{type(error).__name__}: {error}"}
    if evidence is not None:
        contents = {**found, "ranks": {str(one): state for one, state in states.items()}}
        attempt("keeping the evidence", lambda: keep(answers, contents, evidence), timeout_s=patience_s)
    return Diagnosis(verdict=found["verdict"], culprits=culprits, error=error, ranks=states)


def _failures_of_processes(ranks: Sequence[RankProcess]) -> dict[RankId, RankError]:
    """Returns the failure of each process that has ended badly or is stopped."""
    ended = {one.rank_id: _failure(one, _cause_of_end(one)) for one in ranks if one.is_gone and one.exit_code != 0}
    return ended | {one.rank_id: _failure(one, Stopped()) for one in ranks if one.is_stopped}


def _cause_of_end(one: RankProcess) -> Cause:
    """Tells a process that something else has killed from one that gave up by itself.

    A rank that loses a peer often ends with an exit code or by SIGABRT. That says as little as an exception.
    """
    return Died() if one.exit_code is not None and one.exit_code < 0 and one.exit_code != -SIGABRT else Raised()


def _failure(one: RankProcess, cause: Cause) -> RankError:
    noted_s = None if one.folder is None else last_noted_s(one.folder, one.rank_id)
    return RankError(
        rank_id=one.rank_id,
        phase="unknown",
        cause=cause,
        text=one.where(),
        trace="",
        place=one.last_place,
        raised_at=unix_now() if noted_s is None else noted_s + PLACE_EVERY_S,
    )


def _seen_wait(answers: Answers, waiting: Collection[RankId], busy: Collection[RankId]) -> Wait | None:
    """Returns the waiting ranks and the missing ones, as far as the processes show; None if no rank waits."""
    if not waiting:
        return None
    ended = {one.rank_id for one in answers.ranks if one.is_gone}
    roles = sorted({f"the {one.role}s" for one in (*waiting, *busy, *ended)}, reverse=True)
    return Wait(
        phase=None,
        group=" and ".join(roles),
        arrived=frozenset(waiting),
        missing=frozenset(busy) or frozenset(ended),
        waited_s=None,
    )


def _state(one: RankProcess, report: RunError | None) -> str:
    """Returns the end of a sentence about a rank: what it has failed with, else where it is."""
    if isinstance(report, RankError):
        line = (report.text.splitlines() or [""])[0]
        return f"failed in phase {report.phase} at {report.place or 'an unknown line'}: {line}"
    if not one.is_stopped:
        return one.where()
    if one.stack is not None and one.stack.place is not None:
        return f"is stopped at {one.stack.place}"
    return "is stopped" if one.last_place is None else f"is stopped, last seen at {one.last_place}"
