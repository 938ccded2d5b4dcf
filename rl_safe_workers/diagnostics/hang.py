"""Judges a run that hangs: which ranks have arrived, which have not, and where each missing rank is.

`diagnostics.inquiry` asks the processes while they still live. This module keeps their answers as files, and sums them
up in one line.
"""

from __future__ import annotations

import errno
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rl_safe_workers.control.deadline import Deadline, attempt
from rl_safe_workers.diagnostics.flight_recorder import Work, works_waited_in
from rl_safe_workers.diagnostics.inquiry import Answers, RankProcess
from rl_safe_workers.diagnostics.rank_files import stack_file
from rl_safe_workers.diagnostics.verdict_file import VERDICT_FILE
from rl_safe_workers.errors import THE_DRIVER, PhaseTimeoutError, RankError, RunError, StoreLostError, Victim, during
from rl_safe_workers.frames import own_stacks
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import HELPERS, RankId, Role, format_ranks, name_ranks, trainer_id, trainer_ids
from rl_safe_workers.root_cause import ITS_END, STORE_BARRIER, Spot, are_at_the_end, odd_ones, only_waited, spot_of

_EVIDENCE = re.compile(r"verdict\.json|stack_\w+\.txt|flight_\w+")
"""Names of our evidence files. All other files in the folder are the user's."""
_FACTS_S = 0.5
"""The host gets at least so many seconds to add its own facts, even if the deadline has passed."""
_NAMED_NODES = 4
"""Most nodes that a message names. More than these are counted instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The ranks that waited and the ranks that they waited for, as an error tells.

    Example: ``Wait(phase="train", group="the trainers", arrived={trainer_id(0)}, missing={trainer_id(1)}, ...)``
    """

    phase: str | None
    group: str
    arrived: frozenset[RankId]
    missing: frozenset[RankId] | None
    """None if the error names nobody. Then the ranks that are still in a call count as missing."""
    waited_s: float | None
    detail: str = ""
    """Further facts of the error, such as the line of code of the driver's own work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The evidence of a hang."""

    verdict: str
    """One line."""
    culprits: frozenset[RankId] | None
    """The ranks that the others wait for, if the evidence shows them better than the error does; else None."""
    advice: str = ""
    """The next thing to do, if the verdict itself suggests one."""


class AllWait(NamedTuple):
    """Ranks that all wait for each other, or have ended."""

    odd: frozenset[RankId]
    """The ranks that wait elsewhere than most; empty if nobody is known to be wrong."""
    said: str
    """The places of all, in one line."""
    advice: str


def where_all_wait(
    reports: Mapping[RankId, RunError], held: Mapping[RankId, Spot], *, is_whole: bool = True
) -> AllWait:
    """Says where each rank waits if no rank is missing, and names the ranks that wait elsewhere than most.

    Args:
        reports: The failures of the ranks that have given up.
        held: The places of the ranks that still wait.
        is_whole: False if there may be other ranks. Then no rank is named.
    """
    spots = dict(held) | {one: spot for one, report in reports.items() if (spot := spot_of(report)) is not None}
    sides: dict[tuple[Spot, bool], list[RankId]] = {}
    for rank_id, spot in spots.items():
        sides.setdefault((spot, rank_id in reports), []).append(rank_id)
    odd = odd_ones(spots) if is_whole else frozenset()
    by_size = sorted(sides.items(), key=lambda item: (odd.isdisjoint(item[1]), -len(item[1]), min(item[1])))
    head = "no rank is missing" if is_whole else "none of the ranks that were asked is missing"
    ends, counts = are_at_the_end(spots), Counter(spots.values())
    if odd and ends not in (frozenset(), spots.keys()):
        count = "fewer collectives than the others" if odd <= ends else "more collectives than the others, who are done"
        head += f", and {name_ranks(odd)} {'has' if len(odd) == 1 else 'have'} come to {count}"
    elif odd:
        head += f", and {name_ranks(odd)} {'is the odd one' if len(odd) == 1 else 'are the odd ones'}"
    elif len(counts) == 2 and len(set(counts.values())) == 1:
        head += ", and as many wait at one line as at the other"
    advice = (
        "compare these lines: every rank must come to the same collectives, in the same order"
        if len(by_size) > 1
        else "compare the shapes of that collective, and the network between the ranks"
    )
    return AllWait(odd, f"{head}: {'; '.join(_said(ranks, *side) for side, ranks in by_size)}", advice)


def _said(ranks: Collection[RankId], spot: Spot, has_given_up: bool) -> str:
    if spot.op == ITS_END:
        return f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} ended"
    verb = "gave up waiting" if has_given_up else "waits" if len(ranks) == 1 else "wait"
    return f"{name_ranks(ranks)} {verb} {spot}"


def collect_evidence(
    error: BaseException,
    *,
    ask: Callable[[float], Answers],
    folder: Path,
    patience_s: float,
    facts: Mapping[str, Callable[[], Any]] | None = None,
) -> Hang | None:
    """Asks every rank of a failed run where it is, if the failure is a wait for ranks or for the driver.

    Call it in the driver, before the processes are killed. Never raises.

    Args:
        error: The failure of the run. It may name all ranks that are in a call, although some of them only wait for
            the others. On a GPU, only the Flight Recorder can show that.
        ask: Asks the ranks, and waits for no longer than the seconds it is given; e.g. ``cluster.ask_ranks``.
        folder: The run's folder. It gets ``hang/`` with ``verdict.json``, ``stack_<role>_<rank>.txt`` for each process,
            and ``flight_<backend>_<rank>`` for trainers, the Flight Recorder's record as torch writes it. If the driver
            itself is late, also ``stack_driver.txt``.
        patience_s: Longest wait, in seconds.
        facts: Further facts of the host: functions that return JSON values, by name in ``verdict.json``.

    Returns:
        The evidence; None if the error is of another kind.
    """
    of_driver = _wait_of_driver(error)
    if (wait := of_driver or wait_of(error)) is None:
        return None
    hangs: list[Hang] = []
    # The rest of the time is for writing. After that the thread is abandoned.
    deadline = Deadline.after(0.8 * patience_s)
    target = folder / "hang"

    def collect() -> None:
        answers = ask(deadline.remaining().total_seconds())
        hang, found = judge(error, wait, answers, target)
        for name, tell in (facts or {}).items():
            _add(found, name, tell, max(_FACTS_S, deadline.remaining().total_seconds() / 2))
        hangs.append(hang)
        # Last, because the run may hang in the folder's own storage, and the files of thousands of ranks take a while.
        keep(answers, found, target, first=hang.culprits or wait.missing or (), with_own_stacks=of_driver is not None)

    attempt("collecting the evidence of the hang", collect, timeout_s=patience_s)
    return hangs[0] if hangs else None


def _add(found: dict[str, Any], name: str, tell: Callable[[], Any], timeout_s: float) -> None:
    attempt(f"asking for {name}", lambda: found.update({name: tell()}), timeout_s=timeout_s)


def judge(
    error: BaseException | None, wait: Wait, answers: Answers, target: Path | None, *, is_whole: bool = True
) -> tuple[Hang, dict[str, Any]]:
    """Finds the ranks that the others wait for.

    Args:
        error: The failure of the run; None if there are only the answers.
        wait: The waiting and the missing ranks, as the error tells.
        answers: The ranks' answers.
        target: The folder that will hold the evidence; None without one.
        is_whole: True if every rank of the job was asked. If False, and all asked ranks wait, no rank is named.

    Returns:
        The verdict, and the facts behind it as JSON values.
    """
    blame = _blame(error, wait, answers, is_whole=is_whole)
    works = works_waited_in(answers.records, _training_ranks(blame.missing))
    if blame.all_wait is None:
        said = verdict(blame.wait, blame.missing, answers, works, target=target, unknown=blame.unknown)
        hang = Hang(verdict=said, culprits=blame.culprits or None)
    else:
        said = "; ".join([f"hang: {blame.all_wait.said}", *_kept_in(target)])
        hang = Hang(verdict=said, culprits=blame.all_wait.odd, advice=blame.all_wait.advice)
    return hang, {
        "verdict": hang.verdict,
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "wait": {
            "phase": wait.phase,
            "group": wait.group,
            "waited_s": wait.waited_s,
            "arrived": sorted(blame.wait.arrived),
            "missing": sorted(blame.missing),
            "unknown": sorted(blame.unknown),
        },
        "works": {rank: asdict(work) for rank, work in works.items()},
        "actors": [_as_json(one, answers) for one in answers.ranks],
        "silent_nodes": list(answers.silent),
    }


class _Blame(NamedTuple):
    """The ranks that the others wait for, as the answers show them."""

    wait: Wait
    """The wait that the error tells of. If there are culprits, the missing ranks that wait for others have arrived."""
    missing: frozenset[RankId]
    culprits: frozenset[RankId]
    """The ranks to blame, by the answers. If it is empty, the missing ranks are to blame."""
    unknown: frozenset[RankId]
    """Missing ranks that may wait for others themselves."""
    all_wait: AllWait | None
    """Where all ranks wait, if no rank is missing; else None."""


def _blame(error: BaseException | None, wait: Wait, answers: Answers, *, is_whole: bool) -> _Blame:
    missing = _in_calls(wait, answers) - wait.arrived if wait.missing is None else wait.missing
    waiting = missing & waiting_for_others(answers)
    culprits = _culprits(missing - waiting, answers) if waiting else frozenset[RankId]()
    spots = {one.rank_id: one.spot(wait.phase) for one in answers.ranks if one.rank_id in missing | wait.arrived}
    all_wait = None
    if wait.missing is None and isinstance(error, RankError) and not answers.silent:
        held = {one: spots[one] for one in waiting if one in spots}
        all_wait = _if_all_wait(error, wait, missing, held, answers, is_whole=is_whole)
    elif missing <= waiting and wait.arrived <= spots.keys() and (odd := odd_ones(spots)):
        culprits, waiting = odd, frozenset(spots) - odd
        others = f"{name_ranks(waiting)} {'is' if len(waiting) == 1 else 'are'} {spots[min(waiting)]}"
        wait = replace(wait, detail="; ".join([*([wait.detail] if wait.detail else []), others]))
    if not culprits:
        return _Blame(wait, missing, culprits, frozenset(), all_wait)
    told = replace(wait, missing=culprits, arrived=wait.arrived | waiting)
    return _Blame(told, culprits, culprits, missing - waiting - culprits, all_wait)


def _in_calls(wait: Wait, answers: Answers) -> frozenset[RankId]:
    """Returns the ranks that are, or may be, in a call of the host's. It includes all ranks of a silent node."""
    busy = frozenset(one.rank_id for one in answers.ranks if one.stack is None or one.stack.is_in_a_call)
    # A host's engine without a stack may be idle. So it counts only if no other rank that has not arrived is in a call.
    sure = {one.rank_id for one in answers.ranks if one.stack is not None or one.rank_id.role is Role.TRAINER}
    busy = busy & sure if busy & sure - wait.arrived else busy
    return busy.union(rank_id for rank_id, home in answers.homes.items() if home in answers.silent)


def _if_all_wait(
    error: RankError,
    wait: Wait,
    missing: Collection[RankId],
    held: Mapping[RankId, Spot],
    answers: Answers,
    *,
    is_whole: bool,
) -> AllWait | None:
    """Returns where all ranks wait for each other; None if an awaited rank is neither waiting nor at its end.

    Args:
        error: The failure of a rank that has given up waiting.
        wait: The wait that the error tells of.
        missing: Ranks that have not come.
        held: The places of the missing ranks that wait for others themselves.
        answers: The ranks' answers.
        is_whole: As for `judge`.
    """
    reports = {one: report for one, report in answers.reports.items() if only_waited(one, report)}
    reports[error.rank_id] = error
    held = {**held, **at_the_end(wait, answers)}
    to_come = {one for one in missing if one.role not in HELPERS or wait.phase == Phase.ROLLOUT}
    to_come |= {one.rank_id for one in answers.ranks if one.rank_id.role is error.rank_id.role}
    if not to_come <= held.keys() | reports.keys():
        return None
    return where_all_wait(reports, held, is_whole=is_whole)


def _as_json(one: RankProcess, answers: Answers) -> dict[str, Any]:
    return {
        "role": one.rank_id.role,
        "rank": one.rank_id.rank,
        "node": answers.homes.get(one.rank_id),
        "pid": one.pid,
        "status": one.status,
        "exit_code": one.exit_code,
        "cpu_s": one.cpu_s,
        "stack_from": one.source,
        "stack": None if one.stack is None else asdict(one.stack),
        "last_place": one.last_place,
    }


def waiting_for_others(answers: Answers) -> frozenset[RankId]:
    """Returns the ranks that wait for others, by their stacks or by the Flight Recorder."""
    in_collectives = trainer_ids(rank for rank, record in answers.records.items() if record.under_way is not None)
    return frozenset(one.rank_id for one in answers.ranks if one.waits_for_others).union(in_collectives)


def at_the_end(wait: Wait, answers: Answers) -> dict[RankId, Spot]:
    """Returns the trainers that are in teardown or have ended well, while others wait in an earlier phase."""
    found = {}
    if wait.phase != Phase.TEARDOWN:
        for one in answers.ranks:
            if one.rank_id.role is not Role.TRAINER or one.rank_id in answers.reports or one.is_stopped:
                continue
            if one.is_gone and one.exit_code == 0:
                found[one.rank_id] = Spot(Phase.TEARDOWN, ITS_END, None)
            elif not one.is_gone and one.phase == Phase.TEARDOWN:
                found[one.rank_id] = replace(one.spot(wait.phase), op=STORE_BARRIER)
    return found


def _culprits(missing: Collection[RankId], answers: Answers) -> frozenset[RankId]:
    """Returns the missing ranks that certainly wait in no collective. Leaves out silent ranks: they may wait in one."""
    there = {one.rank_id: one for one in answers.ranks}

    def is_known(rank_id: RankId) -> bool:
        if rank_id not in there or there[rank_id].is_gone:
            return answers.homes.get(rank_id) not in answers.silent  # the process is gone
        return there[rank_id].is_stopped or (rank_id.role is Role.TRAINER and rank_id.rank in answers.records)

    return frozenset(filter(is_known, missing))


def keep(
    answers: Answers,
    found: Mapping[str, Any],
    target: Path,
    *,
    first: Collection[RankId] = (),
    with_own_stacks: bool = False,
) -> None:
    """Writes the evidence, the most useful files first: with thousands of ranks, the time may not suffice for all.

    Args:
        answers: The ranks' answers.
        found: The contents of ``verdict.json``.
        target: A folder, made if needed. Evidence of an earlier run in it is removed; other files stay.
        first: The ranks whose files are written first.
        with_own_stacks: True to add the stacks of all threads of this process, the driver.
    """
    target.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "is a link, so no evidence is kept", str(target))
    for path in target.iterdir():
        if _EVIDENCE.fullmatch(path.name):
            path.unlink()  # of an earlier run by the same name
    (target / VERDICT_FILE).write_text(json.dumps(found, indent=1), encoding="utf-8")
    if with_own_stacks:
        (target / "stack_driver.txt").write_text(own_stacks(), encoding="utf-8")
    for one in sorted(answers.ranks, key=lambda one: one.rank_id not in first):
        (target / stack_file(one.rank_id)).write_text(
            one.text or f"no stack: the process is {one.status}\n", encoding="utf-8"
        )
        for child in one.children:
            name = stack_file(one.rank_id).replace(".txt", f"_process_{child.pid}.txt")
            (target / name).write_text(child.text or f"no stack: the process {child.said}\n", encoding="utf-8")
    numbers = {str(rank) for rank in _training_ranks(first)}
    for flights in (lambda: answers.flights, *answers.more_flights):
        for name, contents in sorted(flights().items(), key=lambda item: item[0].rpartition("_")[2] not in numbers):
            (target / name).write_bytes(zlib.decompress(contents))


def _kept_in(target: Path | None) -> list[str]:
    return [] if target is None else [f"evidence in {_from_here(target)}"]


def _from_here(folder: Path) -> Path:
    """Returns a folder's path, relative to the working directory if the folder is in it."""
    with suppress(OSError, ValueError):  # the working directory may have been removed
        return folder.relative_to(Path.cwd())
    return folder


def _training_ranks(ranks: Collection[RankId]) -> set[int]:
    return {one.rank for one in ranks if one.role is Role.TRAINER}


def wait_of(error: BaseException) -> Wait | None:
    """Returns the wait for ranks that an error carries; None if it is about something else."""
    if isinstance(error, PhaseTimeoutError):
        if (members := error.awaited.members) is None:
            return None
        return Wait(
            phase=error.phase,
            group=error.awaited.name,
            waited_s=error.waited_s,
            arrived=members - error.missing,
            missing=error.missing,
        )
    if isinstance(error, RankError) and isinstance(error.cause, Victim):
        victim = error.rank_id
        return Wait(
            phase=error.phase, group=f"the {victim.role}s", waited_s=None, arrived=frozenset({victim}), missing=None
        )
    if isinstance(error, StoreLostError):
        return Wait(phase=None, group="the trainers", waited_s=None, arrived=frozenset(), missing=None)
    return None


def _wait_of_driver(error: BaseException) -> Wait | None:
    """Returns the driver's wait for its own work, if the error is about it; else None."""
    if not isinstance(error, PhaseTimeoutError) or error.awaited != THE_DRIVER:
        return None
    nobody = frozenset[RankId]()
    return Wait(
        phase=error.phase,
        group=error.awaited.name,
        arrived=nobody,
        missing=nobody,
        waited_s=error.waited_s,
        detail=error.detail,
    )


def verdict(
    wait: Wait,
    missing: Collection[RankId],
    answers: Answers,
    works: Mapping[int, Work],
    *,
    target: Path | None,
    unknown: Collection[RankId] = (),
) -> str:
    """Sums the evidence up in one line.

    Args:
        wait: The waiting ranks and the missing ones.
        missing: Ranks that have not come.
        answers: The ranks' answers.
        works: The collective that each training rank waits in.
        target: The folder that holds the evidence; None without one.
        unknown: Ranks that may or may not have come.
    """
    # A missing rank may be in no collective. The collective that the others wait in tells more.
    ranks = sorted(works, key=lambda rank: (trainer_id(rank) in missing, rank))
    ops = [str(works[rank]) for rank in ranks]
    waiting = sorted(answers.ranks, key=lambda one: one.rank_id in missing)
    ops += [one.stack.op for one in waiting if one.stack is not None and one.stack.op is not None]
    where = {one.rank_id: one.where(phase=wait.phase) for one in answers.ranks}
    places: dict[str, set[RankId]] = {}
    for rank_id in (*missing, *unknown):
        places.setdefault(where.get(rank_id) or _absence(rank_id, answers), set()).add(rank_id)
    when = [during(wait.phase).removeprefix("in ")] if wait.phase else []
    parts = [
        f"hang: {', '.join([*when, wait.group, *ops[:1]])}: {_attendance(wait, missing)}",
        *([wait.detail] if wait.detail else []),
        *(
            f"{name_ranks(of_place)}{_homes(of_place, answers)} {place}"
            for place, of_place in sorted(places.items(), key=lambda item: min(item[1]))
        ),
        *([f"no answer from {_nodes(answers.silent)}"] if answers.silent else []),
        *_kept_in(target),
    ]
    return "; ".join(parts)


def _absence(rank_id: RankId, answers: Answers) -> str:
    home = answers.homes.get(rank_id)
    if home in answers.silent:
        return "cannot be asked"
    place = answers.last_places.get(rank_id)
    last_seen = "" if place is None else f", last seen at {place}"
    return f"has no process {'on this machine' if home is None else 'there'}{last_seen}"


def home_of(rank_id: RankId, answers: Answers) -> str:
    """Returns the node that a rank is on, e.g. ``" on 10.0.0.4"``; empty where all are on this machine."""
    return _homes((rank_id,), answers)


def _homes(ranks: Collection[RankId], answers: Answers) -> str:
    nodes = {answers.homes[one]: None for one in sorted(ranks) if one in answers.homes}
    return f" on {_nodes(list(nodes))}" if nodes else ""


def _nodes(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _NAMED_NODES else f"{len(names)} nodes"


def _attendance(wait: Wait, missing: Collection[RankId]) -> str:
    waited = "" if wait.waited_s is None else f" within {wait.waited_s:.1f} s"
    if wait.missing is None:
        who = f"{name_ranks(wait.arrived)} gave up waiting" if wait.arrived else "a rank gave up waiting"
        return who if missing else f"{who}, and no rank runs a call any more"
    if not missing and not wait.arrived:
        return f"did not finish{waited}"
    if not missing:
        return f"all arrived, and did not finish{waited}"
    if {one.role for one in (*missing, *wait.arrived)} == {Role.TRAINER}:
        arrived = format_ranks(one.rank for one in wait.arrived) or "none"
        return f"{arrived} arrived, {format_ranks(one.rank for one in missing)} did not{waited}"
    return f"{name_ranks(wait.arrived) or 'none'} arrived, {name_ranks(missing)} did not{waited}"
