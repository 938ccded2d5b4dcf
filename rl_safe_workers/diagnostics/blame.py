"""Names the ranks that a job's failure began with. Runs on each rank that fails, and needs no driver.

    culprits, why = blame(control.reported_failures(), silent=[1], among=neighbours)

It uses the reports of the other ranks, and asks the ranks on the same machine.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from rl_safe_workers.control.deadline import attempt
from rl_safe_workers.diagnostics.diagnosis import Reports, diagnose, told_of_stop
from rl_safe_workers.diagnostics.hang import AllWait, where_all_wait
from rl_safe_workers.diagnostics.inquiry import RankProcess
from rl_safe_workers.diagnostics.neighbours import PATIENCE_S, Neighbours, in_lines, new_evidence, say
from rl_safe_workers.diagnostics.onlooker import find_ranks
from rl_safe_workers.diagnostics.proc_facts import look_at
from rl_safe_workers.errors import Awaited, PhaseTimeoutError, RankError, Stopped, during, first_line
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import TRAINING_WORLD, RankId, name_ranks, trainer_id, trainer_ids
from rl_safe_workers.root_cause import root_cause


def blame(
    reports: Reports, *, silent: Collection[int], among: Neighbours | None = None
) -> tuple[Collection[RankId], str]:
    """Names the ranks that a job's failure began with, and says what they did.

    Args:
        reports: The failures that ranks have reported, at least one.
        silent: The training ranks that have reported nothing.
        among: The ranks on this machine, to ask if the culprits' own reports are missing. None: no rank is asked.

    Returns:
        The ranks, empty if unknown, and one line about them. More lines may follow: what to do, and the folder of the
        evidence.
    """
    if among is not None:
        # A rank may have given up in the same second as this one.
        reports = {**among.failures(), **reports, **among.stops()}
    cause = root_cause(reports, pending=set(trainer_ids(silent)) - reports.keys())
    if among is not None and not (cause.is_told and cause.culprits <= reports.keys()):
        diagnosis = among.judge(reports)
        if diagnosis is not None and diagnosis.is_told:
            return diagnosis.culprits, among.in_lines(diagnosis)
        if diagnosis is None and (heard := among.heard()) is not None:
            return heard
        if not cause.culprits and (on_late := among.came_late(reports)) is not None:
            return on_late
        waiting = among.waiting()
        if cause.culprits <= waiting.keys():
            return _in_two_lines(where_all_wait(reports, waiting))
    if isinstance(cause.error, RankError) and isinstance(cause.error.cause, Stopped):
        if among is not None:
            among.end_stopped()
        late = next((error for error in reports.values() if isinstance(error, PhaseTimeoutError)), None)
        told = told_of_stop(cause.error, "" if late is None else f" {during(late.phase)}")
        return cause.culprits, f"{name_ranks(cause.culprits)} {told}"
    if cause.is_told:
        asked = [] if among is None else sorted(cause.culprits - reports.keys())
        seen = [f"{one} {told}" for one in asked if among is not None and (told := among.last_seen(one))]
        return cause.culprits, "; ".join([first_line(cause.error), *seen])
    if cause.culprits:
        return cause.culprits, "hangs, or is gone: it has said nothing"
    return _in_two_lines(where_all_wait(reports, {}))


def _in_two_lines(told: AllWait) -> tuple[Collection[RankId], str]:
    return told.odd, f"{told.said}\n{told.advice}"


def blame_for_the_end(
    silent: Collection[int], *, rank: int, size: int, waited_s: float, setting: str, among: Neighbours | None
) -> tuple[PhaseTimeoutError, Collection[RankId], str]:
    """Names the ranks that have not ended with the others.

    Args:
        silent: The training ranks that have reported nothing, at least one.
        rank: This training rank, which is well.
        size: Number of training ranks.
        waited_s: How long this rank has waited, in seconds.
        setting: The setting that moves the deadline.
        among: As for `blame`.

    Returns:
        The error, followed by the two results of `blame`.
    """
    late = late_for_the_end(silent, size=size, waited_s=waited_s, setting=setting)
    return late, *blame({trainer_id(rank): late}, silent=silent, among=among)


def say_who_is_late(late: PhaseTimeoutError, *, rank: int) -> None:
    """Logs which ranks have not come to the first meeting of a job's ranks, and their lines of code.

    The late ranks have not called this package yet, so they answer no request. py-spy looks at those on this machine
    from outside. This takes at most six times `PATIENCE_S`. The lowest rank that has come keeps the evidence.

    Args:
        late: The error about them.
        rank: This training rank.
    """
    assert late.awaited.members is not None, "a wait for ranks"
    processes: list[RankProcess] = []

    def find() -> None:
        for pid in find_ranks([os.getpid()]):
            if (number := look_at(pid).number("RANK")) is not None and trainer_id(number) in late.missing:
                processes.append(RankProcess(rank_id=trainer_id(number), pid=pid))

    attempt("looking for the late ranks", find, timeout_s=2 * PATIENCE_S)
    if not processes:
        said = "no process of this machine has their rank in its environment, so nobody knows where they are"
        say(rank, late.missing, f"{first_line(late)}\n{said}")
        return
    keeps = trainer_id(rank) == min(late.awaited.members - late.missing, default=None)
    evidence = new_evidence() if keeps else None
    found = diagnose(processes, patience_s=2 * PATIENCE_S, reports={trainer_id(rank): late}, evidence=evidence)
    say(rank, found.culprits, in_lines(found, evidence))


def late_for_the_end(late: Collection[int], *, size: int, waited_s: float, setting: str) -> PhaseTimeoutError:
    """Returns an error that names training ranks that have not ended with the others.

    Args:
        late: These ranks.
        size: Number of training ranks.
        waited_s: How long the others have waited, in seconds.
        setting: The setting that moves the deadline.
    """
    return PhaseTimeoutError(
        phase=Phase.TEARDOWN,
        awaited=Awaited(TRAINING_WORLD, frozenset(trainer_ids(range(size)))),
        missing=trainer_ids(late),
        waited_s=waited_s,
        setting=setting,
    )
