"""The verdict on a run that hangs: who has arrived, who has not, and where each missing rank is.

The actors are asked while they still live, on whichever node (`driver.inquiry`). What they say is kept, and summed up
in one line.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray._private import state as ray_state

from rl_safe_workers.driver.actors import stack_file
from rl_safe_workers.driver.cleanup import attempt
from rl_safe_workers.driver.flights import Work, waiting_ranks, works_waited_in
from rl_safe_workers.driver.inquiry import Answers
from rl_safe_workers.driver.stacks import relative
from rl_safe_workers.errors import PhaseTimeoutError, RankError, StoreLostError, Victim
from rl_safe_workers.ranks import RankId, Role, format_ranks, name_ranks, trainer_id, trainer_ids

logger = logging.getLogger(__name__)

_EVIDENCE = re.compile(r"verdict\.json|stack_\w+\.txt|flight_\w+")
"""Names of the files that are kept; whatever else lies beside them is the user's."""
_RAY_S = 0.5
"""What Ray gets to list its actors in, however late it is."""
_NAMED_NODES = 4
"""More than so many are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Who waited for whom, as far as the error tells.

    Example: ``Wait(phase="train", group="the trainers", arrived={trainer_id(0)}, missing={trainer_id(1)}, ...)``
    """

    phase: str | None
    group: str
    arrived: frozenset[RankId]
    missing: frozenset[RankId] | None
    """None if the error names nobody: whoever is still in a call then."""
    waited_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """What the evidence of a hang says."""

    verdict: str
    """One line."""
    culprits: frozenset[RankId] | None
    """The ranks that the others wait for, where that is known better now than the error has it; else None."""


def collect_evidence(
    error: BaseException, *, ask: Callable[[float], Answers], folder: Path, patience_s: float
) -> Hang | None:
    """Asks every actor of a run that has failed where it is, if the failure is about ranks that did not come.

    To be called before the actors are killed. Never raises.

    Args:
        error: What the run has failed with. Where it names all that are in a call, the Flight Recorder may show that
            some of them only wait for the others: on a GPU nobody else can tell.
        ask: Asks the actors, and waits for no longer than the seconds it is given; e.g. ``cluster.ask_actors``.
        folder: The run's; gets ``hang/`` with ``verdict.json``, ``stack_<role>_<rank>.txt`` for each actor, and of
            trainers ``flight_<backend>_<rank>``, what the Flight Recorder has, as torch writes it.
        patience_s: Longest wait, in seconds.

    Returns:
        What was found; None if the error is of another kind, or a wait of the driver alone.
    """
    if (wait := wait_of(error)) is None:
        return None
    hangs: list[Hang] = []
    # Leaves the thread time to write what it has before it is left behind.
    deadline_s = time.monotonic() + 0.8 * patience_s
    target = folder / "hang"

    def collect() -> None:
        answers = ask(_left(deadline_s))
        hang, found = _judge(error, wait, answers, target, deadline_s)
        hangs.append(hang)
        # Last: the folder's storage may be what the run hangs in, and the files of thousands of ranks take a while.
        _keep(answers, found, target)

    attempt("collecting the evidence of the hang", collect, timeout_s=patience_s)
    return hangs[0] if hangs else None


def _judge(
    error: BaseException, wait: Wait, answers: Answers, target: Path, deadline_s: float
) -> tuple[Hang, dict[str, Any]]:
    """Returns the verdict, and what it comes from, fit for JSON."""
    actors, records = answers.actors, answers.records
    in_ray: list[dict[str, Any]] = []
    left_s = max(_RAY_S, _left(deadline_s) / 2)
    attempt("asking Ray for its actors", lambda: in_ray.extend(_ray_actors()), timeout_s=left_s)
    busy = frozenset(actor.rank_id for actor in actors if actor.stack is None or actor.stack.is_in_a_call)
    busy |= {rank_id for rank_id, home in answers.homes.items() if home in answers.silent}
    missing, unknown = busy - wait.arrived if wait.missing is None else wait.missing, frozenset[RankId]()
    works = works_waited_in(records, _training_ranks(missing))
    waiting = missing.intersection(trainer_ids(waiting_ranks(works)))
    culprits = _culprits(missing - waiting, answers) if waiting else frozenset[RankId]()
    if culprits:
        missing, unknown = culprits, missing - waiting - culprits
        works = works_waited_in(records, _training_ranks(missing))
        wait = replace(wait, missing=missing, arrived=wait.arrived | waiting)
    hang = Hang(
        verdict=verdict(wait, missing, answers, works, target=target, unknown=unknown), culprits=culprits or None
    )
    return hang, {
        "verdict": hang.verdict,
        "error": f"{type(error).__name__}: {error}",
        "wait": {
            "phase": wait.phase, "group": wait.group, "waited_s": wait.waited_s,
            "arrived": sorted(wait.arrived), "missing": sorted(missing), "unknown": sorted(unknown),
        },
        "works": {rank: asdict(work) for rank, work in works.items()},
        "actors": [
            {
                "role": actor.rank_id.role, "rank": actor.rank_id.rank, "node": answers.homes.get(actor.rank_id),
                "pid": actor.pid, "status": actor.status, "cpu_s": actor.cpu_s, "stack_from": actor.source,
                "stack": None if actor.stack is None else asdict(actor.stack),
            }
            for actor in actors
        ],
        "silent_nodes": list(answers.silent),
        "ray": in_ray,
    }  # fmt: skip


def _culprits(missing: Collection[RankId], answers: Answers) -> frozenset[RankId]:
    """Missing ranks known not to be waiting in a collective. That nothing was heard of a rank tells nothing."""
    there = {actor.rank_id: actor for actor in answers.actors}

    def is_known(rank_id: RankId) -> bool:
        if rank_id not in there:
            return answers.homes.get(rank_id) not in answers.silent  # the process is gone
        return there[rank_id].is_stopped or (rank_id.role is Role.TRAINER and rank_id.rank in answers.records)

    return frozenset(filter(is_known, missing))


def _keep(answers: Answers, found: Mapping[str, Any], target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "is a link, so no evidence is kept", str(target))
    for path in target.iterdir():
        if _EVIDENCE.fullmatch(path.name):
            path.unlink()  # of an earlier run by the same name
    (target / "verdict.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    for actor in answers.actors:
        (target / stack_file(actor.rank_id)).write_text(
            actor.text or f"no stack: the process is {actor.status}\n", encoding="utf-8"
        )
    for flights in (lambda: answers.flights, *answers.more_flights):
        for name, contents in flights().items():
            (target / name).write_bytes(zlib.decompress(contents))


def _training_ranks(ranks: Collection[RankId]) -> set[int]:
    return {one.rank for one in ranks if one.role is Role.TRAINER}


def _left(deadline_s: float) -> float:
    return max(0.1, deadline_s - time.monotonic())


def wait_of(error: BaseException) -> Wait | None:
    """Tells who waited for whom, by what an error carries; None if it is about something else."""
    if isinstance(error, PhaseTimeoutError):
        if (members := error.awaited.members) is None:
            return None
        return Wait(
            phase=error.phase, group=error.awaited.name, waited_s=error.waited_s,
            arrived=members - error.missing, missing=error.missing,
        )  # fmt: skip
    if isinstance(error, RankError) and isinstance(error.cause, Victim):
        victim = error.rank_id
        return Wait(
            phase=error.phase, group=f"the {victim.role}s", waited_s=None, arrived=frozenset({victim}), missing=None
        )
    if isinstance(error, StoreLostError):
        return Wait(phase=None, group="the trainers", waited_s=None, arrived=frozenset(), missing=None)
    return None


def _ray_actors() -> list[dict[str, Any]]:
    """Ray's list of this driver's actors, which needs no dashboard."""
    if not ray.is_initialized():
        return []
    job = ray.get_runtime_context().get_job_id()
    return [
        {
            "class": actor["ActorClassName"], "state": actor["State"], "pid": actor["Pid"],
            "address": actor["Address"]["IPAddress"], "node_id": actor["Address"]["NodeID"],
        }
        for actor in ray_state.actors().values()
        if actor["JobID"] == job
    ]  # fmt: skip


def verdict(
    wait: Wait,
    missing: Collection[RankId],
    answers: Answers,
    works: Mapping[int, Work],
    *,
    target: Path,
    unknown: Collection[RankId] = (),
) -> str:
    """Sums the evidence up in one line.

    Args:
        wait: Who waited for whom.
        missing: Ranks that have not come.
        answers: What the actors have said.
        works: The collective that a training rank waits in.
        target: Where the evidence is.
        unknown: Ranks that may have come or not.
    """
    # A missing rank may be in nothing: what the others wait in says more.
    ranks = sorted(works, key=lambda rank: (trainer_id(rank) in missing, rank))
    ops = [str(works[rank]) for rank in ranks]
    waiting = sorted(answers.actors, key=lambda actor: actor.rank_id in missing)
    ops += [actor.stack.op for actor in waiting if actor.stack is not None and actor.stack.op is not None]
    where = {actor.rank_id: actor.where() for actor in answers.actors}
    places: dict[str, set[RankId]] = {}
    for rank_id in (*missing, *unknown):
        places.setdefault(where.get(rank_id) or _absence(rank_id, answers), set()).add(rank_id)
    parts = [
        "hang: " + ", ".join([*([f"phase {wait.phase}"] if wait.phase else []), wait.group, *ops[:1]]) + ": "
        f"{_attendance(wait, missing)}",
        *(
            f"{name_ranks(of_place)}{_homes(of_place, answers)} {place}"
            for place, of_place in sorted(places.items(), key=lambda item: min(item[1]))
        ),
        *([f"no answer from {_nodes(answers.silent)}"] if answers.silent else []),
        f"evidence in {relative(str(target))}",
    ]
    return "; ".join(parts)


def _absence(rank_id: RankId, answers: Answers) -> str:
    home = answers.homes.get(rank_id)
    if home is None:
        return "has no process on this machine"
    return "cannot be asked" if home in answers.silent else "has no process there"


def _homes(ranks: Collection[RankId], answers: Answers) -> str:
    nodes = {answers.homes[one]: None for one in sorted(ranks) if one in answers.homes}
    return f" on {_nodes(list(nodes))}" if nodes else ""


def _nodes(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _NAMED_NODES else f"{len(names)} nodes"


def _attendance(wait: Wait, missing: Collection[RankId]) -> str:
    waited = "" if wait.waited_s is None else f" within {wait.waited_s:.1f} s"
    if wait.missing is None:
        who = f"{name_ranks(wait.arrived)} waited in vain" if wait.arrived else "a rank waited in vain"
        return who if missing else f"{who}, nobody is in a call any more"
    if not missing:
        return f"all arrived, and did not finish{waited}"
    if {one.role for one in (*missing, *wait.arrived)} == {Role.TRAINER}:
        arrived = format_ranks(one.rank for one in wait.arrived) or "none"
        return f"{arrived} arrived, {format_ranks(one.rank for one in missing)} did not{waited}"
    return f"{name_ranks(wait.arrived) or 'none'} arrived, {name_ranks(missing)} did not{waited}"
