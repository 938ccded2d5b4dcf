"""Names the rank to blame for a run that fails or hangs: from its processes, its store and the host's knowledge.

    ranks = [RankProcess(rank_id=trainer_id(0), pid=popen.pid, poll=popen.poll, folder=folder), ...]
    diagnosis = diagnose(ranks, reports=control.reported_failures, patience_s=10.0)
    print(diagnosis.verdict)

It needs neither a driver nor Ray. Each rank calls `answering.answer_when_asked` early, and reports its failure to the
store by `ControlPlane.report_failure`. If a rank does neither, the verdict says only what the operating system knows
about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from signal import SIGABRT
from typing import Any

from rl_safe_workers.control.deadline import attempt
from rl_safe_workers.diagnostics.answering import ALIVE_EVERY_S
from rl_safe_workers.diagnostics.endings import Ending, joined
from rl_safe_workers.diagnostics.flight_recorder import works_waited_in
from rl_safe_workers.diagnostics.hang import Wait, at_the_end, home_of, judge, keep, wait_of, waiting_for_others
from rl_safe_workers.diagnostics.inquiry import Answers, RankProcess, ask_ranks
from rl_safe_workers.diagnostics.log_lines import ADVICE, OF_FOREIGN, Fault
from rl_safe_workers.diagnostics.mismatch import Mismatch, find_mismatch
from rl_safe_workers.diagnostics.rank_files import last_alive_s, stack_file
from rl_safe_workers.diagnostics.stacks import CallFrame
from rl_safe_workers.errors import (
    Cause,
    Died,
    PhaseTimeoutError,
    Raised,
    RankError,
    Repeats,
    RunError,
    Stopped,
    Victim,
    during,
    first_line,
)
from rl_safe_workers.lifecycle import Phase, unix_now
from rl_safe_workers.ranks import HELPERS, RankId, Role, name_ranks, trainer_id, trainer_ids
from rl_safe_workers.root_cause import RootCause, Spot, root_cause

Reports = Mapping[RankId, RunError]
_NAMED = 4
"""A verdict on a hang says of at most so many ranks why their processes ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The rank to blame, and the place of each rank.

    Example: ``Diagnosis(verdict="training rank 1 was killed by SIGKILL, ...", culprits={trainer_id(1)}, ...)``
    """

    verdict: str
    """One line."""
    advice: str
    """The next thing to do, in one line."""
    culprits: frozenset[RankId]
    """Ranks that the failure began with; empty if none is known."""
    fault: Fault | None
    """The kind of failure that has ended or stopped the first of these ranks; None if it is not known."""
    error: RunError | None
    """The root cause, from the ranks' reports and the state of their processes; None if nothing has failed."""
    ranks: Mapping[RankId, str]
    """Each rank's action or failure, and its line of code, as the end of a sentence."""
    waiting: Mapping[RankId, Spot] = field(default_factory=dict)
    """The ranks that have not failed and wait for others."""

    @property
    def is_told(self) -> bool:
        """True if the verdict names the origin of the failure: a rank, or a collective with different shapes."""
        return bool(self.culprits) or self.fault is Fault.SHAPES


def diagnose(
    ranks: Sequence[RankProcess],
    *,
    patience_s: float,
    reports: Reports | Callable[[], Reports] | None = None,
    evidence: Path | None = None,
    call_frame: CallFrame | None = None,
) -> Diagnosis:
    """Finds the ranks that a failure or a hang began with. Never raises. Call it while the processes still live.

    Args:
        ranks: The run's processes on this machine.
        patience_s: Longest wait, in seconds, for each of: the reports, the processes' answers, the evidence.
        reports: The failures that ranks or the host have reported; or a function that returns them, such as
            ``control.reported_failures``. The function may hang if the store does.
        evidence: Folder that gets ``verdict.json``, stacks and Flight Recorder files; None: nothing is written.
        call_frame: Where the host's calls run; None: the main thread counts, as in a script.
    """

    def ask(patience_s: float) -> Answers:
        return ask_ranks(lambda: ranks, patience_s=patience_s, call_frame=call_frame)

    return diagnose_answers(
        ask, patience_s=patience_s, reports=reports, evidence=evidence, on_ray=False, is_whole=False
    )


def diagnose_answers(
    ask: Callable[[float], Answers],
    *,
    patience_s: float,
    reports: Reports | Callable[[], Reports] | None = None,
    evidence: Path | None = None,
    phase: str | None = None,
    host_error: RunError | None = None,
    endings: Callable[[], Mapping[RankId, Ending]] = dict,
    on_ray: bool = True,
    is_whole: bool = True,
) -> Diagnosis:
    """Does the same as `diagnose`, for processes on any machines.

    Args:
        ask: Asks the processes, and waits for no longer than the seconds that it is given.
        patience_s: As for `diagnose`.
        reports: As for `diagnose`.
        evidence: As for `diagnose`.
        phase: The phase that the host waits in; None if it is not known. A phase that a rank has noted itself wins.
        host_error: The error of the host's driver. It counts only if no rank's report names the culprits.
        endings: Returns why processes have ended, as far as the host knows. Called after ``ask`` and ``reports``.
        on_ray: True if Ray keeps the output of the processes, for the advice.
        is_whole: False if the job may have ranks that nobody asks, such as those of other machines.
    """
    reported: dict[RankId, RunError] = {}
    attempt(
        "reading the ranks' reports",
        lambda: reported.update(reports() if callable(reports) else reports or {}),
        timeout_s=patience_s,
    )
    facts = _Facts.of(ask(patience_s), reported, endings, phase)
    root = _root(facts.known, facts.busy, host_error, phase)
    error = None if root is None else root.error
    found = _find(root, facts, is_whole=is_whole)
    fault = found.fault or _fault(error, found.culprits, facts)
    diagnosis = Diagnosis(
        verdict=found.contents["verdict"],
        advice=found.advice or _advice(error, found.wait, found.culprits, facts, fault, on_ray=on_ray),
        culprits=found.culprits,
        error=error,
        fault=fault,
        ranks=facts.states,
        waiting=facts.spots_of_waiting() | ({} if found.wait is None else at_the_end(found.wait, facts.answers)),
    )
    if evidence is not None:
        contents = _contents(found, diagnosis, facts, host_error)
        attempt(
            "keeping the evidence",
            lambda: keep(facts.answers, contents, evidence, first=diagnosis.culprits),
            timeout_s=patience_s,
        )
    return diagnosis


def _contents(found: _Found, diagnosis: Diagnosis, facts: _Facts, host_error: RunError | None) -> Mapping[str, Any]:
    """Returns the contents of ``verdict.json``, which `verdict_file` reads."""
    return {
        **found.contents,
        "culprits": sorted(diagnosis.culprits),
        "advice": diagnosis.advice,
        "fault": diagnosis.fault,
        **({} if host_error is None else {"driver": str(host_error)}),
        "ranks": {str(one): state for one, state in diagnosis.ranks.items()},
        "waiting": [[*one, *astuple(spot)] for one, spot in diagnosis.waiting.items()],
        "endings": {str(one): str(ending) for one, ending in facts.whys.items() if ending is not None},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """All facts from the ranks, their processes and the host."""

    answers: Answers
    """The ranks' answers. Their ``reports`` also hold the failures that reached the host in another way."""
    known: Reports
    """The failure of each rank that has reported one, has ended badly or is stopped."""
    waiting: frozenset[RankId]
    """Ranks that wait for others."""
    busy: frozenset[RankId]
    """Ranks that others may wait for."""
    whys: Mapping[RankId, Ending | None]
    """Why processes have ended."""
    phase: str | None
    """The phase that the host waits in."""
    states: Mapping[RankId, str]
    """See `Diagnosis.ranks`."""

    @classmethod
    def of(
        cls, answers: Answers, reported: Reports, endings: Callable[[], Mapping[RankId, Ending]], phase: str | None
    ) -> _Facts:
        """Joins what ranks have reported to the host with their answers."""
        answers = replace(answers, reports={**reported, **answers.reports})
        whys = _whys(endings(), answers, answers.reports)
        known = {**_failures_of_processes(answers, phase), **answers.reports}
        waiting = waiting_for_others(answers)
        return cls(
            answers=answers,
            known=known,
            waiting=waiting,
            busy=frozenset(one.rank_id for one in answers.ranks if _is_busy(one)) - known.keys() - waiting,
            whys=whys,
            phase=phase,
            states={one.rank_id: _state(one, answers.reports.get(one.rank_id), phase) for one in answers.ranks},
        )

    def spots_of_waiting(self) -> dict[RankId, Spot]:
        """Returns the places of the ranks that wait for others and have reported no failure."""
        silent = self.waiting - self.answers.reports.keys()
        return {one.rank_id: one.spot(self.phase) for one in self.answers.ranks if one.rank_id in silent}


@dataclass(frozen=True, slots=True)
class _Found:
    """A verdict, as one of the `_found_in_*` functions reaches it."""

    contents: Mapping[str, Any]
    """The verdict and the facts behind it, for ``verdict.json``."""
    culprits: frozenset[RankId] = frozenset()
    wait: Wait | None = None
    """The wait that has been judged."""
    fault: Fault | None = None
    """None: take it from the first culprit's ending, or from its error."""
    advice: str = ""
    """Empty: take it from the fault."""


def _find(root: RootCause | None, facts: _Facts, *, is_whole: bool) -> _Found:
    """Reaches the verdict: on different shapes, else on a wait for ranks, else on a failure."""
    if root is not None and (mismatch := _mismatch(root, facts.answers, facts.whys)) is not None:
        return _found_in_mismatch(mismatch, root, facts)
    wait = _seen_wait(facts) if root is None else wait_of(root.error)
    if wait is not None:
        return _found_in_hang(root, wait, facts, is_whole=is_whole)
    if root is not None:
        return _found_in_failure(root, facts)
    return _Found({"verdict": "no rank has failed, and no rank waits for others"})


def _found_in_mismatch(mismatch: Mismatch, root: RootCause, facts: _Facts) -> _Found:
    """Names the ranks that came to a collective with a shape unlike the others'."""
    culprits = frozenset(trainer_ids(mismatch.culprits))
    places = [(one, _place(one, facts.answers, facts.known)) for one in sorted(culprits)]
    at = [f"{one}{home_of(one, facts.answers)} was at {place}" for one, place in places if place is not None]
    verdict = "; ".join([f"{Fault.SHAPES} in {mismatch.work or 'a collective'}: {mismatch.said}", *at])
    return _Found({"verdict": verdict, "error": _with_kind(root.error)}, culprits, fault=Fault.SHAPES)


def _found_in_hang(root: RootCause | None, wait: Wait, facts: _Facts, *, is_whole: bool) -> _Found:
    """Names the ranks that the others wait for."""
    waiting, busy = facts.waiting, facts.busy
    if root is not None and wait.missing is not None:
        # Some of the ranks that the error names wait themselves.
        missing = (root.culprits - waiting) or root.culprits or wait.missing or _busy_helpers(busy, wait.phase)
        wait = replace(wait, missing=missing, arrived=(wait.arrived | wait.missing) - missing)
    hang, contents = judge(None if root is None else root.error, wait, facts.answers, None, is_whole=is_whole)
    culprits = wait.missing or busy - wait.arrived if hang.culprits is None else hang.culprits
    ended = [f"{one}{why}" for one in sorted(culprits) if (why := _because(facts.whys.get(one)))]
    phases = _other_phases(facts.answers.reports, culprits, wait.phase)
    verdict = "; ".join([hang.verdict, *phases, *ended[:_NAMED]])
    if root is not None and not root.is_told and not hang.advice:
        culprits -= facts.known.keys()  # a rank that has only waited is not to blame
    return _Found({**contents, "verdict": verdict}, frozenset(culprits), wait, advice=hang.advice)


def _found_in_failure(root: RootCause, facts: _Facts) -> _Found:
    """Names the ranks that a failure began with, if no other rank waits for them."""
    known, phase = facts.known, facts.phase
    # If no culprit has reported anything, the error is another rank's, which only repeats what it has heard.
    said = [] if any(one in known for one in root.culprits) else [first_line(root.error)]
    names = [
        f"{one}{home_of(one, facts.answers)} {facts.states.get(one) or _unseen(known.get(one), phase)}"
        f"{_because(facts.whys.get(one))}"
        for one in sorted(root.culprits)
    ]
    # The sentence about a rank that has failed names the phase already.
    when = ""
    if phase is not None and root.culprits and not root.culprits & known.keys():
        when = during(phase).removeprefix("in ") + ": "
    verdict = when + "; ".join([*names, *_others(facts.answers, root.culprits, known), *said])
    return _Found({"verdict": verdict, "error": _with_kind(root.error)}, frozenset(root.culprits))


def _with_kind(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _root(known: Reports, busy: Collection[RankId], host_error: RunError | None, phase: str | None) -> RootCause | None:
    """Returns the failure that all others follow from: a rank's if it names the culprits, else the host's."""
    root = root_cause(known, pending=busy) if known else None
    if root is not None and root.is_told:
        return root
    if (astray := _root_of_astray(known, phase)) is not None:
        return astray
    if isinstance(host_error, PhaseTimeoutError) and (host_error.missing or root is None):
        return RootCause(host_error, culprits=host_error.missing, is_told=True)
    if host_error is not None and host_error.culprit is not None:
        return RootCause(host_error, culprits=frozenset({host_error.culprit}), is_told=True)
    if root is not None and isinstance(root.error, PhaseTimeoutError) and root.error.awaited.members is None:
        # The wait is not for ranks.
        return RootCause(root.error, culprits=frozenset(), is_told=True)
    return root


def _mismatch(root: RootCause, answers: Answers, whys: Mapping[RankId, Ending | None]) -> Mismatch | None:
    """Returns the mismatch of shapes that has ended the culprits; None if nothing shows one."""
    ended = [one for one in root.culprits if one.role is Role.TRAINER]
    if not ended or not isinstance(root.error, RankError) or not isinstance(root.error.cause, Died):
        return None
    endings = [ending for one in ended if (ending := whys.get(one)) is not None]
    if any(ending.fault not in (Fault.ABORTED, Fault.SILENT_END, Fault.SHAPES) for ending in endings):
        return None
    aborted_in = next((ending.aborted_in for ending in endings if ending.aborted_in), "")
    is_sure = any(ending.fault is Fault.SHAPES for ending in endings)
    return find_mismatch(answers.records, ended={one.rank for one in ended}, aborted_in=aborted_in, is_sure=is_sure)


def _place(rank_id: RankId, answers: Answers, known: Reports) -> str | None:
    """Returns the line of code where a rank has failed, is now, or was last seen; None if unknown."""
    if isinstance(report := known.get(rank_id), RankError) and report.place is not None:
        return report.place
    process = next((one for one in answers.ranks if one.rank_id == rank_id), None)
    if process is not None and process.stack is not None and process.stack.place is not None:
        return str(process.stack.place)
    return answers.last_places.get(rank_id) if process is None else process.last_place


def _root_of_astray(known: Reports, phase: str | None) -> RootCause | None:
    """Returns the majority's wait, if a minority waits in another phase. Names the minority. Else returns None.

    Args:
        known: The failure of each rank.
        phase: The phase that the host waits in. It decides if two phases have the same number of ranks.
    """
    late = {rank_id: error for rank_id, error in known.items() if isinstance(error, PhaseTimeoutError)}
    counts = Counter(error.phase for error in late.values())
    most = max(counts.values(), default=0)
    usual = [name for name, count in counts.items() if count == most]
    if phase in usual:
        usual = [str(phase)]
    if len(counts) < 2 or len(usual) > 1:
        return None
    astray = frozenset(rank_id for rank_id, error in late.items() if error.phase != usual[0])
    told = next(error for error in late.values() if error.phase == usual[0])
    return RootCause(told.with_missing(astray), culprits=astray, is_told=True) if astray <= told.missing else None


def _is_busy(one: RankProcess) -> bool:
    """Returns True if others may wait for a process: it runs a call of the host's, or nobody knows that it does not."""
    if one.is_gone:
        return False
    # An engine that answers no signal does not count as busy: nobody knows if it does anything.
    return one.rank_id.role is Role.TRAINER if one.stack is None else one.stack.is_in_a_call


def _busy_helpers(busy: Collection[RankId], phase: str | None) -> frozenset[RankId]:
    """Returns the helper processes that a rollout waits for. They answer requests, but one of their threads is busy."""
    return frozenset(one for one in busy if one.role in HELPERS and phase == Phase.ROLLOUT)


def _other_phases(reported: Reports, culprits: Collection[RankId], phase: str | None) -> list[str]:
    """Returns, in words, the phases other than ``phase`` that culprits have waited in; empty if none is known."""
    phases: dict[str, list[RankId]] = {}
    for one in culprits:
        if isinstance(report := reported.get(one), PhaseTimeoutError) and report.phase != phase:
            phases.setdefault(report.phase, []).append(one)
    return [f"{name_ranks(ranks)} waited {during(other)}" for other, ranks in sorted(phases.items())]


def _others(answers: Answers, culprits: Collection[RankId], known: Reports) -> list[str]:
    """Returns, in words, the collective that one other rank was in when the culprits failed; empty if unknown."""
    works = works_waited_in(answers.records, {one.rank for one in culprits if one.role is Role.TRAINER})
    for rank, record in answers.records.items():
        report = known.get(trainer_id(rank))
        # A victim fails in the last collective that it began.
        if isinstance(report, RankError) and isinstance(report.cause, Victim) and record.last is not None:
            works.setdefault(rank, record.last)
    others = sorted(rank for rank in works if trainer_id(rank) not in culprits)
    return [f"training rank {others[0]} was in {works[others[0]]}"] if others else []


def _failures_of_processes(answers: Answers, phase: str | None) -> dict[RankId, RankError]:
    """Returns the failure of each process that has ended badly or is stopped."""
    gone = [one for one in answers.ranks if one.is_gone and one.exit_code != 0]
    ended = {one.rank_id: _failure(one, _cause_of_end(one, answers), phase) for one in gone}
    return ended | {one.rank_id: _failure(one, Stopped(), phase) for one in answers.ranks if one.is_stopped}


def _cause_of_end(one: RankProcess, answers: Answers) -> Cause:
    """Distinguishes a process that something else has killed from a process that gave up by itself.

    A rank that loses a peer often ends with an exit code or by SIGABRT. Neither tells more than an exception does. If
    a collective of NCCL times out, torch first writes its record of the collectives, and then ends the rank by SIGABRT.
    """
    if one.never_ends:
        record = answers.records.get(one.rank_id.rank) if one.rank_id.role is Role.TRAINER else None
        return Died() if record is None or record.under_way is None else Victim()
    return Died() if one.exit_code is not None and one.exit_code < 0 and one.exit_code != -SIGABRT else Raised()


def _failure(one: RankProcess, cause: Cause, phase: str | None) -> RankError:
    alive_s = None if one.folder is None else last_alive_s(one.folder, one.rank_id)
    return RankError(
        rank_id=one.rank_id,
        phase=one.phase or phase or "unknown",
        cause=cause,
        text=one.where(),
        trace="",
        place=one.last_place,
        raised_at=unix_now() if alive_s is None else alive_s + ALIVE_EVERY_S,
    )


def _seen_wait(facts: _Facts) -> Wait | None:
    """Returns the waiting ranks and the missing ones, as far as the processes show; None if no rank waits."""
    if not facts.waiting:
        return None
    ended = frozenset(one.rank_id for one in facts.answers.ranks if one.is_gone)
    roles = sorted({f"the {one.role}s" for one in (*facts.waiting, *facts.busy, *ended)}, reverse=True)
    return Wait(
        phase=None,
        group=" and ".join(roles),
        arrived=facts.waiting,
        missing=facts.busy or ended,
        waited_s=None,
    )


def _state(one: RankProcess, report: RunError | None, phase: str | None) -> str:
    """Returns the end of a sentence about a rank: what it has failed with, else where it is."""
    if isinstance(report, RankError) and not isinstance(report.cause, Died | Stopped):
        line = (report.text.splitlines() or [""])[0]
        return f"failed {during(report.phase)} at {report.place or 'an unknown line'}: {line}"
    when = _when(one.phase or phase)
    if not one.is_stopped and isinstance(report, RankError) and isinstance(report.cause, Stopped):
        return told_of_stop(report, when)
    if report is not None and _is_of_host(report) and not one.is_gone:
        # The host cannot reach it any more: it is about to end.
        return f"died{when}" + ("" if one.last_place is None else f", last seen at {one.last_place}")
    return one.where(when)


def _when(phase: str | None) -> str:
    return "" if phase is None else f" {during(phase)}"


def told_of_stop(report: RankError, when: str = "") -> str:
    """Returns the end of a sentence about a rank that was ended because it was stopped.

    Args:
        report: The stop, as the rank's failure.
        when: When it was stopped, e.g. ``" in phase train"``.
    """
    return f"{report.text}{when}" + ("" if report.place is None else f", last seen at {report.place}")


def _unseen(report: RunError | None, phase: str | None) -> str:
    """Returns the end of a sentence about a rank whose process has not been found."""
    if isinstance(report, RankError) and isinstance(report.cause, Stopped):
        return told_of_stop(report, _when(phase))
    if isinstance(report, RankError) and isinstance(report.cause, Died):
        return f"died{_when(phase)}"
    return "is unknown here"


def _because(ending: Ending | None) -> str:
    return f": {ending}" if ending is not None and ending.is_known else ""


def _whys(of_host: Mapping[RankId, Ending], answers: Answers, reported: Reports) -> dict[RankId, Ending | None]:
    """Returns why processes have ended, for the ranks that have not reported a failure themselves."""
    of_machine = {one.rank_id: one.ending for one in answers.ranks if one.ending is not None}
    silent = {one for one in (*of_host, *of_machine) if one not in reported or _is_of_host(reported[one])}
    return {one: joined(of_host.get(one), of_machine.get(one)) for one in sorted(silent)}


def _fault(error: RunError | None, culprits: Collection[RankId], facts: _Facts) -> Fault | None:
    """Returns the kind of the first culprit's failure, by the ending of its process, else by its exception."""
    if any(one.kernel_wait for one in facts.answers.ranks if one.rank_id in culprits):
        return Fault.ASLEEP
    endings = [ending for one in sorted(culprits) if (ending := facts.whys.get(one)) is not None and ending.is_known]
    if endings:
        return endings[0].fault
    if isinstance(error, RankError) and isinstance(error.cause, Raised) and error.rank_id in culprits:
        return OF_FOREIGN.get(error.foreign)
    return None


def _is_of_host(report: RunError) -> bool:
    """Returns True if the host made a report: a dead rank reports nothing itself."""
    return isinstance(report, RankError) and isinstance(report.cause, Died)


def _advice(
    error: RunError | None,
    wait: Wait | None,
    culprits: Collection[RankId],
    facts: _Facts,
    fault: Fault | None,
    *,
    on_ray: bool,
) -> str:
    """Returns what to do, in one line."""
    if fault is not None:
        return ADVICE[fault]
    endings = [ending for one in sorted(culprits) if (ending := facts.whys.get(one)) is not None]
    node = home_of(min(culprits), facts.answers).removeprefix(" on ") if culprits else ""
    cause = error.cause if isinstance(error, RankError) else None
    logs = "Ray's logs" if on_ray else "the job's log"
    if isinstance(cause, Died) or endings:
        why = endings[0] if endings else "the rank has left no reason"
        return (
            f"{why}: search the kernel log of {node or 'its machine'} for the OOM killer, and {logs} for the end of "
            "its output; also look for a call of os._exit, and for a person or script that kills processes"
        )
    if isinstance(cause, Stopped):
        pids = [str(one.pid) for one in facts.answers.ranks if one.rank_id in culprits and not one.is_gone]
        ended = "it was ended: see the setting timeouts.stopped"
        resume = f"to resume it: kill -CONT {' '.join(pids)}" if pids else ended
        return f"find out what has sent SIGSTOP, such as a debugger or a scheduler; {resume}"
    if isinstance(error, PhaseTimeoutError):
        if culprits and all(one.role in HELPERS for one in culprits):
            files = ", ".join(stack_file(one) for one in sorted(culprits)[:_NAMED])
            return (
                f"see in {files} what the reward function, tool or agent loop waits for, and give it a timeout of its "
                f"own; if it only needs more time, raise {error.setting}"
            )
        return (
            f"if the phase only needs more time, raise {error.setting}; else read stack_<role>_<rank>.txt of the rank "
            "that is named"
        )
    if wait is not None or isinstance(cause, Victim):
        return "see stack_<role>_<rank>.txt of the rank that is named: the others wait for what it does there"
    if isinstance(cause, Repeats):
        return f"search {logs} for the first error of {cause.of}; verdict.json has every rank's place"
    return "correct what the line does; verdict.json has every rank's place"
