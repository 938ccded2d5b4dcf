"""Finds the ranks that hold the others up, from what an onlooker sees. Pure. Names nobody without certain facts.

A collective of the world needs every rank. So a rank outside it certainly holds it up. For any other group, an onlooker
cannot see the members. So a rank is named there only if it is the only one that does not wait.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from signal import SIGABRT, SIGTERM

from rl_safe_workers.diagnostics.explanation import Explanation, Row
from rl_safe_workers.diagnostics.log_lines import ADVICE, Fault
from rl_safe_workers.diagnostics.onlooker import Members, Sighting, Standing
from rl_safe_workers.ranks import format_ranks

_ADVICE = {
    Standing.GONE: "look for its error in its log, and end the others: they wait for a process that is gone",
    Standing.STOPPED: "continue it (kill -CONT PID), or end its debugger",
    Standing.ASLEEP: ADVICE[Fault.ASLEEP],
    Standing.ELSEWHERE: "look at that line: the others go on once it is done there",
    Standing.CALLS: "look at that line, and at the actor that it calls",
    Standing.IDLE: "look at the driver: it has called the other actors, and not this one",
}
_OTHERWISE = (
    "set TORCH_FR_BUFFER_SIZE and TORCH_NCCL_DEBUG_INFO_PIPE_FILE before the next run, "
    "and read the Flight Recorder's files with `rl-safe explain FOLDER`"
)
_CAUSES = {
    Standing.GONE: "process gone",
    Standing.STOPPED: "process stopped",
    Standing.ASLEEP: str(Fault.ASLEEP),
    Standing.ELSEWHERE: "rank outside the collective",
    Standing.CALLS: "rank outside the collective",
    Standing.IDLE: "actor not called",
}
_OF_VICTIMS = (SIGABRT, SIGTERM)
"""Signals that often end the victims of a failure: a process aborts after it lost a peer, or its launcher ends it."""
_HARD = (Standing.GONE, Standing.STOPPED, Standing.ASLEEP)
_OUTSIDE = (Standing.ELSEWHERE, Standing.CALLS, Standing.IDLE)
_NOT_AT_WORK = (Standing.WAITS, Standing.DEVICE, Standing.CALLS, Standing.IDLE)


def explain_sightings(sightings: Sequence[Sighting], *, notes: Sequence[str] = ()) -> Explanation:
    """Returns an explanation that names the ranks which hold the others up.

    Args:
        sightings: The processes of one job.
        notes: Sentences about what was not looked at.
    """
    sightings, bystanders = _of_the_job(sightings)
    missing = _missing_ranks(sightings)
    waiting = [one for one in sightings if one.standing in (Standing.WAITS, Standing.DEVICE)]
    called = _called(sightings, bystanders, waiting, is_whole=not missing and not notes)
    verdict, culprits, cause, advice = (
        called or _left_alone(sightings, missing) or _judge(sightings, waiting, is_whole=not missing)
    )
    notes = [*notes, *_notes(sightings, missing)]
    named = {one.facts.pid for one in culprits}
    return Explanation(
        verdict=verdict,
        advice=advice,
        is_known=bool(cause),
        cause=cause,
        culprits=[one.name for one in culprits],
        rows=[
            Row(who=one.name, what=one.where(), is_culprit=one.facts.pid in named, evidence=_evidence(one))
            for one in (*sightings, *bystanders)
        ],
        notes=notes,
    )


_Judgement = tuple[str, Sequence[Sighting], str, str]
"""The verdict, the culprits, the cause and the advice; the cause is empty if it is not known."""


def _judge(sightings: Sequence[Sighting], waiting: Sequence[Sighting], *, is_whole: bool) -> _Judgement:
    if not sightings:
        return _unknown("no process was found", "check the process ids, and the user who asks")
    if len(gone := [one for one in sightings if one.standing is Standing.GONE]) > 1:
        return _several_gone(gone, waiting)
    hard = [one for kind in _HARD for one in sightings if one.standing is kind]
    if hard and (waiting or hard[0].facts.exit_code != 0):  # a rank may end well before the others
        return _blame([one for one in hard if one.standing is hard[0].standing], waiting)
    if not waiting:
        return _nobody_waits(sightings)
    moving = [one for one in waiting if not one.stays and one.standing is Standing.WAITS]
    if len(moving) == len(waiting):
        return _unknown(
            f"the ranks move: {_names(moving)} {_verb(moving, 'was', 'were')} not in the same wait in both looks, "
            "so nothing stands still",
            "ask again when the run stands still; one look is one moment",
        )
    outside = [one for one in sightings if one.standing in _OUTSIDE]
    unclear = [one for one in sightings if one.standing is Standing.UNKNOWN]
    return (
        _outside(outside, waiting, sightings, unclear, is_whole=is_whole)
        if outside
        else _all_wait(waiting, unclear, is_whole=is_whole)
    )


def _called(
    ranks: Sequence[Sighting], bystanders: Sequence[Sighting], waiting: Sequence[Sighting], *, is_whole: bool
) -> _Judgement | None:
    """Judges a job that waits for a call of one of its actors; returns None for any other job.

    While ranks are in a collective, the job waits for a call if all other ranks are in ``ray.get``. While no rank is in
    a collective, the job waits for a call in two cases: an actor is in ``ray.get``, or all actors but one are in no
    call.

    Args:
        ranks: Processes of the classes that take part in collectives; all processes if none is in one.
        bystanders: The other actors.
        waiting: The ranks that are in a collective.
        is_whole: True if every process was looked at. If False, no rank is named.
    """
    every = [*ranks, *bystanders]
    callers = [one for one in every if one.standing is Standing.CALLS]
    at_work = [one for one in every if one.standing not in _NOT_AT_WORK]
    if waiting and (not callers or any(one in at_work or one.standing is Standing.IDLE for one in ranks)):
        return None
    if not callers and not (len(at_work) == 1 and at_work[0].actor and len(every) > 1):
        return None
    hard = [one for kind in _HARD for one in at_work if one.standing is kind]
    suspects = [one for one in at_work if one.standing is hard[0].standing] if hard else at_work
    is_seen = all(one.stays and one.standing is not Standing.UNKNOWN for one in suspects)
    if len(suspects) == 1 and is_whole and (hard or is_seen):
        return _blame(suspects, [*callers, *waiting])
    if not callers:
        return None
    busy = f"; {_names(suspects)} {_verb(suspects, 'is', 'are')} in a call" if suspects else ""
    at = next((f" at {one.place}" for one in callers if one.place is not None), "")
    return _unknown(
        f"{_names(callers)} {_verb(callers, 'waits', 'wait')} for a call of another actor{at}{busy}",
        "look at the lines of the actors that are in a call, on every node",
    )


def _left_alone(sightings: Sequence[Sighting], missing: Collection[int]) -> _Judgement | None:
    """Judges a job on one machine if only one rank is left; None unless all others certainly ended well.

    torchrun ends all ranks as soon as it learns that one has failed. So if the last rank is still alive, the ranks
    without a process have ended well.

    Args:
        sightings: The ranks.
        missing: Ranks of the world without a process here.
    """
    gone = [one for one in sightings if one.standing is Standing.GONE]
    left = [one for one in sightings if one not in gone]
    if len(left) != 1 or left[0].standing is not Standing.ELSEWHERE or not left[0].stays:
        return None
    facts = left[0].facts
    size = facts.number("WORLD_SIZE") or 0
    if size < 2 or size != facts.number("LOCAL_WORLD_SIZE") or any(one.facts.exit_code != 0 for one in gone):
        return None
    unnamed = sum(one.global_rank is None for one in gone)  # a zombie has no environment any more
    if left[0].global_rank is None or (len(missing) > unnamed and not facts.dies_with_others):
        return None
    said = f"{left[0].name} {left[0].where()}; {'the other rank has' if size == 2 else 'all other ranks have'} ended"
    return said, left, "rank has not ended", "look at that line: the job ends once it is done there"


def _several_gone(gone: Sequence[Sighting], waiting: Sequence[Sighting]) -> _Judgement:
    """Judges a job if several processes have ended. Some are victims: they lost a peer and exited by themselves."""
    killed = [one for one in gone if (one.facts.exit_code or 0) < 0 and -(one.facts.exit_code or 0) not in _OF_VICTIMS]
    if killed:
        return _blame(killed, waiting)
    return _unknown(
        f"{_names(gone)} have ended, and no exit status tells which was the first: "
        + "; ".join(dict.fromkeys(one.facts.describe_end() for one in gone)),
        "read their logs: `rl-safe explain FOLDER`",
    )


def _outside(
    outside: Sequence[Sighting],
    waiting: Sequence[Sighting],
    sightings: Sequence[Sighting],
    unclear: Sequence[Sighting],
    *,
    is_whole: bool,
) -> _Judgement:
    """Judges a job if some ranks are in no collective while others are in one."""
    if (ends := _ends_of_receives(waiting, sightings)) and all(one in outside for one in ends):
        return _blame(ends, waiting)
    of_the_world = [one for one in waiting if one.members is Members.WORLD and one.peer is None and one.stays]
    if of_the_world and len(outside) <= len(waiting):
        return _blame(outside, waiting)
    if of_the_world:
        return _unknown(
            f"{_names(of_the_world)} {_verb(of_the_world, 'waits', 'wait')} in {of_the_world[0].wait} at "
            f"{of_the_world[0].place}, and more ranks are outside it than in it: either they are late, or "
            f"{_names(of_the_world)} should not be there",
            "compare the lines below: which of the two should be there?",
        )
    if len(outside) == 1 and not unclear and is_whole and len({_spot(one) for one in waiting}) == 1:
        return _blame(outside, waiting)
    why = (
        "not all ranks were looked at"
        if not is_whole
        else f"it cannot be seen whether {_names(unclear)} {_verb(unclear, 'waits', 'wait')}"
        if unclear
        else "the members of a group cannot be seen from outside"
    )
    return _unknown(
        f"{why}; {_names(outside)} {_verb(outside, 'is', 'are')} in no collective and may hold up "
        f"{_names(waiting)}, in {waiting[0].wait}",
        "look at the lines of the ranks that are in no collective first",
    )


def _ends_of_receives(waiting: Sequence[Sighting], sightings: Sequence[Sighting]) -> list[Sighting]:
    """Follows receives from rank to rank. Returns the ranks at the ends; empty if one of these waits, too."""
    by_rank = {one.global_rank: one for one in sightings if one.global_rank is not None}
    ends: dict[int, Sighting] = {}
    for start in waiting:
        at, seen = start, set[int]()
        while at.peer is not None and at.peer in by_rank and at.facts.pid not in seen and at.stays:
            seen.add(at.facts.pid)
            at = by_rank[at.peer]
        if at.standing is Standing.WAITS:
            return []
        ends[at.facts.pid] = at
    return list(ends.values())


def _all_wait(waiting: Sequence[Sighting], unclear: Sequence[Sighting], *, is_whole: bool) -> _Judgement:
    """Judges a job in which nobody is seen outside a collective."""
    if unclear or not is_whole:
        why = (
            f"it is not known where {_names(unclear)} {_verb(unclear, 'is', 'are')} ({unclear[0].doubt})"
            if unclear
            else "not all ranks were looked at"
        )
        return _unknown(f"{why}, and all others wait in a collective", _OTHERWISE)
    spots: dict[tuple[str, str], list[Sighting]] = {}
    for one in waiting:
        spots.setdefault((one.wait, str(one.place)), []).append(one)
    said = "; ".join(
        f"{_names(group)} {_verb(group, 'is', 'are')} in {wait} at {place}" for (wait, place), group in spots.items()
    )
    ops: dict[str | None, list[Sighting]] = {}
    for one in waiting:
        ops.setdefault(one.op, []).append(one)
    certain = all(one.members is Members.WORLD and one.peer is None and one.stays and one.op for one in waiting)
    if certain and len(ops) > 1:
        by_size = sorted(ops.values(), key=len)
        few = by_size[0] if len(by_size[0]) < len(by_size[1]) else list[Sighting]()
        return (
            f"ranks are in different collectives: {said}",
            few,
            "ranks in different collectives",
            "look at the branch that leads to one line and not to the other: every rank must take the same",
        )
    if len(spots) > 1:
        return _unknown(f"every rank waits, and not in the same collective: {said}", _OTHERWISE)
    return _unknown(
        f"every rank waits in the same place, {said}: different shapes, or a network or GPU that does not answer",
        _OTHERWISE,
    )


def _nobody_waits(sightings: Sequence[Sighting]) -> _Judgement:
    unclear = [one for one in sightings if one.standing is Standing.UNKNOWN]
    if unclear:
        return _unknown(
            f"it cannot be seen whether {_names(unclear)} {_verb(unclear, 'waits', 'wait')}: {unclear[0].doubt}",
            "run this command as the user of the processes or as root, in their container, with py-spy installed",
        )
    one = next((one for one in sightings if one.standing is Standing.ELSEWHERE), sightings[0])
    return _unknown(
        f"no rank waits for others; {one.name} {one.where()}", "look at the lines below: each rank works or waits alone"
    )


def _blame(culprits: Sequence[Sighting], waiting: Sequence[Sighting]) -> _Judgement:
    said = "; ".join(f"{one.name} {one.where()}" for one in culprits)
    held = [one for one in waiting if one not in culprits]
    if held:
        calls = "a call of an actor"
        waits = ", ".join(dict.fromkeys(calls if one.standing is Standing.CALLS else one.wait for one in held))
        said += f"; {_names(held)} {_verb(held, 'waits', 'wait')} for {_verb(culprits, 'it', 'them')} in {waits}"
    kind = culprits[0].standing
    advice = _ADVICE[kind].replace("PID", " ".join(str(one.facts.pid) for one in culprits))
    return said, culprits, _CAUSES[kind], advice


def _unknown(why: str, advice: str) -> _Judgement:
    return f"not known, because {why}", (), "", advice


def _of_the_job(sightings: Sequence[Sighting]) -> tuple[list[Sighting], list[Sighting]]:
    """Splits processes into ranks and bystanders: actors of a class in which no process waits in a collective."""
    if not any(one.actor for one in sightings):
        return list(sightings), []
    classes = {one.actor for one in sightings if one.standing in (Standing.WAITS, Standing.DEVICE)}
    taking_part = [one for one in sightings if one.actor in classes or not classes]
    return taking_part, [one for one in sightings if one not in taking_part]


def _missing_ranks(sightings: Sequence[Sighting]) -> list[int]:
    """Returns the ranks of the world that have no process here; empty if the size of the world is unknown."""
    sizes = {one.facts.number("WORLD_SIZE") for one in sightings} - {None}
    there = {one.global_rank for one in sightings}
    size = max((size for size in sizes if size is not None), default=0)
    return [rank for rank in range(min(size, 10**6)) if rank not in there]


def _notes(sightings: Sequence[Sighting], missing: Collection[int]) -> list[str]:
    notes = []
    if missing:
        notes.append(
            f"not looked at: {'rank' if len(missing) == 1 else 'ranks'} {format_ranks(missing)} "
            f"{'has' if len(missing) == 1 else 'have'} no process here: "
            "on another node, or gone; run `rl-safe explain --pid` there"
        )
    full = [one for one in sightings if one.facts.free_bytes is not None and one.facts.limit_bytes]
    for one in full[:1]:
        assert one.facts.free_bytes is not None
        assert one.facts.limit_bytes is not None
        if one.facts.free_bytes < 0.02 * one.facts.limit_bytes:
            notes.append(f"the control group of {one.name} has {one.facts.free_bytes / 2**20:.0f} MiB of memory left")
    return notes


def _evidence(one: Sighting) -> str:
    facts = one.facts
    parts = [f"state {facts.state}"]
    parts += [f"wchan {facts.kernel_wait}"] if facts.kernel_wait else []
    parts += [f"system call {facts.system_call}"] if facts.system_call else []
    parts += [f"{facts.resident_bytes / 2**20:.0f} MiB"] if facts.resident_bytes else []
    return ", ".join([*parts, *([facts.command] if facts.command else [])])


def _spot(one: Sighting) -> tuple[str | None, str]:
    return one.op, str(one.place)


def _names(sightings: Iterable[Sighting]) -> str:
    sightings = list(sightings)
    if len(sightings) == 1:
        return sightings[0].name
    ranks: dict[str, list[int]] = {}
    for one in sightings:
        if one.global_rank is not None:
            ranks.setdefault(one.actor, []).append(one.global_rank)
    rest = [one for one in sightings if one.global_rank is None]
    parts = [
        f"rank{'s' if len(numbers) > 1 else ''} {format_ranks(numbers)}{f' of {actor}' if actor else ''}"
        for actor, numbers in ranks.items()
    ]
    if rest:
        parts.append(f"{_verb(rest, 'process', 'processes')} {format_ranks(one.facts.pid for one in rest)}")
    return " and ".join(parts)


def _verb(sightings: Sequence[Sighting], one: str, many: str) -> str:
    return one if len(sightings) == 1 else many
