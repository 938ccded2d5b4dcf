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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray._private import state as ray_state

from rl_safe_workers.driver.actor_group import NOR
from rl_safe_workers.driver.actors import IN_VAIN, stack_file
from rl_safe_workers.driver.cleanup import attempt
from rl_safe_workers.driver.flights import Work, waiting_ranks, works_waited_in
from rl_safe_workers.driver.inquiry import Answers, Who
from rl_safe_workers.driver.nodes import JOINING, LOOK_AT_NODES, NODE_AGENTS
from rl_safe_workers.driver.stacks import relative
from rl_safe_workers.errors import CommunicatorError, PhaseTimeoutError, RankError
from rl_safe_workers.ranks import Role, format_ranks

logger = logging.getLogger(__name__)

_WAITED_FOR_BY_THE_DRIVER = (
    "the driver", "the placement group", "the making of the model", JOINING, LOOK_AT_NODES, NODE_AGENTS,
)  # fmt: skip
"""Groups of a PhaseTimeoutError that are no ranks."""
_MEMBERS = re.compile(r"\[([\d, ]+)\]")
"""Training ranks in the name of a group."""
_ALSO_MISSING = re.compile(r"\(nor ([^;)]+)")
_RANK = re.compile(r"(trainer|rollout) rank (\d+)")
_EVIDENCE = re.compile(r"verdict\.json|stack_\w+\.txt|flight_\w+")
"""Names of the files that are kept; whatever else lies beside them is the user's."""
_RAY_S = 0.5
"""What Ray gets to list its actors in, however late it is."""
_NAMED_NODES = 4
"""More than so many are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Who waited for whom, as far as the error tells.

    Example: ``Wait(phase="train", group="the trainers", arrived={("trainer", 0)}, missing={("trainer", 1)}, ...)``
    """

    phase: str | None
    group: str
    arrived: frozenset[Who]
    missing: frozenset[Who] | None
    """None if the error names nobody: whoever is still in a call then."""
    waited_s: float | None


def collect_evidence(
    error: BaseException, *, ask: Callable[[float], Answers], folder: Path, trainers: int, patience_s: float
) -> str | None:
    """Asks every actor of a run that has failed where it is, if the failure is about ranks that did not come.

    To be called before the actors are killed. Never raises.

    Args:
        error: What the run has failed with. Where it names all that are in a call, and the Flight Recorder shows that
            some of them only wait for the others, it names these others from then on: on a GPU nobody else can tell.
        ask: Asks the actors, and waits for no longer than the seconds it is given; e.g. ``cluster.ask_actors``.
        folder: The run's; gets ``hang/`` with ``verdict.json``, ``stack_<role>_<rank>.txt`` for each actor, and of
            trainers ``flight_<backend>_<rank>``, what the Flight Recorder has, as torch writes it.
        trainers: Number of training ranks.
        patience_s: Longest wait, in seconds.

    Returns:
        The verdict, one line; None if the error is of another kind, or a wait of the driver alone.
    """
    if (wait := wait_of(error, trainers)) is None:
        return None
    verdicts: list[str] = []
    # Leaves the thread time to write what it has before it is left behind.
    deadline_s = time.monotonic() + 0.8 * patience_s
    target = folder / "hang"

    def collect() -> None:
        answers = ask(_left(deadline_s))
        found = _judge(error, wait, answers, target, deadline_s)
        verdicts.append(found["verdict"])
        # Last: the folder's storage may be what the run hangs in, and the files of thousands of ranks take a while.
        _keep(answers, found, target)

    attempt("collecting the evidence of the hang", collect, timeout_s=patience_s)
    return verdicts[0] if verdicts else None


def _judge(error: BaseException, wait: Wait, answers: Answers, target: Path, deadline_s: float) -> dict[str, Any]:
    """Returns the verdict with what it comes from; makes the error name the culprits, if these are known better now."""
    actors, records, said = answers.actors, answers.records, f"{type(error).__name__}: {error}"
    in_ray: list[dict[str, Any]] = []
    left_s = max(_RAY_S, _left(deadline_s) / 2)
    attempt("asking Ray for its actors", lambda: in_ray.extend(_ray_actors()), timeout_s=left_s)
    busy = frozenset(actor.who for actor in actors if actor.stack is None or actor.stack.is_in_a_call)
    busy |= {who for who, home in answers.homes.items() if home in answers.silent}
    missing, unknown = busy - wait.arrived if wait.missing is None else wait.missing, frozenset[Who]()
    works = works_waited_in(records, _training_ranks(missing))
    waiting = {(Role.TRAINER.value, rank) for rank in waiting_ranks(works)} & missing
    if waiting and (culprits := _culprits(missing - waiting, answers)):
        missing, unknown = culprits, missing - waiting - culprits
        works = works_waited_in(records, _training_ranks(missing))
        wait = replace(wait, missing=missing, arrived=wait.arrived | waiting)
        _blame(error, missing)
    return {
        "verdict": verdict(wait, missing, answers, works, target=target, unknown=unknown),
        "error": said,
        "wait": {
            "phase": wait.phase, "group": wait.group, "waited_s": wait.waited_s,
            "arrived": sorted(wait.arrived), "missing": sorted(missing), "unknown": sorted(unknown),
        },
        "works": {rank: asdict(work) for rank, work in works.items()},
        "actors": [
            {
                "role": actor.who[0], "rank": actor.who[1], "node": answers.homes.get(actor.who), "pid": actor.pid,
                "status": actor.status, "cpu_s": actor.cpu_s, "stack_from": actor.source,
                "stack": None if actor.stack is None else asdict(actor.stack),
            }
            for actor in actors
        ],
        "silent_nodes": list(answers.silent),
        "ray": in_ray,
    }  # fmt: skip


def _culprits(missing: Collection[Who], answers: Answers) -> frozenset[Who]:
    """Those of the missing that are known not to wait like the rest: that nothing was heard of a rank tells nothing."""
    there = {actor.who: actor for actor in answers.actors}

    def is_known(who: Who) -> bool:
        if who not in there:
            return answers.homes.get(who) not in answers.silent  # the process is gone
        role, rank = who
        return there[who].is_stopped or (role == Role.TRAINER and rank in answers.records)

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
        (target / stack_file(*actor.who)).write_text(
            actor.text or f"no stack: the process is {actor.status}\n", encoding="utf-8"
        )
    for flights in (lambda: answers.flights, *answers.more_flights):
        for name, contents in flights().items():
            (target / name).write_bytes(zlib.decompress(contents))


def _training_ranks(who: Collection[Who]) -> set[int]:
    return {rank for role, rank in who if role == Role.TRAINER}


def _blame(error: BaseException, missing: Collection[Who]) -> None:
    """Makes a driver's error name those who are missing; one of the ranks' own knows better."""
    groups = {f"the {role}s": [rank for of, rank in sorted(missing) if of == role] for role in Role}
    if not isinstance(error, PhaseTimeoutError) or error.group not in groups:
        return
    group = next(group for group, ranks in groups.items() if ranks)
    others = sorted(who for who in missing if f"the {who[0]}s" != group)
    said = error.detail.partition("; ")[2] if error.detail.startswith(NOR) else error.detail
    nor = NOR + ", ".join(f"{role} rank {rank}" for role, rank in others)
    error.blame(group, groups[group], "; ".join(filter(None, (nor if others else "", said))))


def _left(deadline_s: float) -> float:
    return max(0.1, deadline_s - time.monotonic())


def wait_of(error: BaseException, trainers: int) -> Wait | None:
    """Reads from an error who waited for whom; None if it is about something else."""
    if isinstance(error, PhaseTimeoutError):
        if error.group in _WAITED_FOR_BY_THE_DRIVER:
            return None
        missing = {_member(rank, error.group, trainers) for rank in error.missing}
        if also := _ALSO_MISSING.search(str(error)):
            missing |= {(role, int(rank)) for role, rank in _RANK.findall(also[1])}
        named = _MEMBERS.search(error.group)
        ranks = range(trainers) if named is None else [int(rank) for rank in named[1].split(",")]
        arrived: set[Who] = set() if error.group == "the rollouts" else {(Role.TRAINER.value, rank) for rank in ranks}
        return Wait(
            phase=str(error.phase), group=error.group, waited_s=error.waited_s,
            arrived=frozenset(arrived - missing), missing=frozenset(missing),
        )  # fmt: skip
    if isinstance(error, RankError) and error.in_vain:
        in_vain = frozenset({(str(error.role), error.rank)})
        return Wait(phase=str(error.phase), group=f"the {error.role}s", waited_s=None, arrived=in_vain, missing=None)
    if isinstance(error, CommunicatorError) and IN_VAIN.search(str(error)):
        return Wait(phase=None, group="the trainers", waited_s=None, arrived=frozenset(), missing=None)
    return None


def _member(rank: int, group: str, trainers: int) -> Who:
    if group == "the rollouts":
        return Role.ROLLOUT.value, rank
    # In the joint group rollout ranks are counted on from the trainers.
    return (Role.TRAINER.value, rank) if rank < trainers else (Role.ROLLOUT.value, rank - trainers)


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
    missing: Collection[Who],
    answers: Answers,
    works: Mapping[int, Work],
    *,
    target: Path,
    unknown: Collection[Who] = (),
) -> str:
    """Sums the evidence up in one line.

    Args:
        wait: Who waited for whom.
        missing: Who has not come.
        answers: What the actors have said.
        works: The collective that a training rank waits in.
        target: Where the evidence is.
        unknown: Who may have come or not.
    """
    # Whoever is missing may be in nothing: what the others wait in says more.
    ranks = sorted(works, key=lambda rank: ((Role.TRAINER.value, rank) in missing, rank))
    ops = [str(works[rank]) for rank in ranks]
    waiting = sorted(answers.actors, key=lambda actor: actor.who in missing)
    ops += [actor.stack.op for actor in waiting if actor.stack is not None and actor.stack.op is not None]
    where = {actor.who: actor.where() for actor in answers.actors}
    places: dict[str, set[Who]] = {}
    for who in (*missing, *unknown):
        places.setdefault(where.get(who) or _absence(who, answers), set()).add(who)
    parts = [
        "hang: " + ", ".join([*([f"phase {wait.phase}"] if wait.phase else []), wait.group, *ops[:1]]) + ": "
        f"{_attendance(wait, missing)}",
        *(
            f"{_names(of_place)}{_homes(of_place, answers)} {place}"
            for place, of_place in sorted(places.items(), key=lambda item: min(item[1]))
        ),
        *([f"no answer from {_nodes(answers.silent)}"] if answers.silent else []),
        f"evidence in {relative(str(target))}",
    ]
    return "; ".join(parts)


def _absence(who: Who, answers: Answers) -> str:
    home = answers.homes.get(who)
    if home is None:
        return "has no process on this machine"
    return "cannot be asked" if home in answers.silent else "has no process there"


def _homes(who: Collection[Who], answers: Answers) -> str:
    nodes = {answers.homes[one]: None for one in sorted(who) if one in answers.homes}
    return f" on {_nodes(list(nodes))}" if nodes else ""


def _nodes(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _NAMED_NODES else f"{len(names)} nodes"


def _attendance(wait: Wait, missing: Collection[Who]) -> str:
    waited = "" if wait.waited_s is None else f" within {wait.waited_s:.1f} s"
    if wait.missing is None:
        who = f"{_names(wait.arrived)} waited in vain" if wait.arrived else "a rank waited in vain"
        return who if missing else f"{who}, nobody is in a call any more"
    if not missing:
        return f"all arrived, and did not finish{waited}"
    if {role for role, _ in {*missing, *wait.arrived}} == {Role.TRAINER.value}:
        arrived = format_ranks([rank for _, rank in wait.arrived]) or "none"
        return f"{arrived} arrived, {format_ranks([rank for _, rank in missing])} did not{waited}"
    return f"{_names(wait.arrived) or 'none'} arrived, {_names(missing)} did not{waited}"


def _names(ranks: Iterable[Who]) -> str:
    """Names ranks, trainers first: ``trainer rank 0, 2-3, rollout rank 1``."""
    ranks = list(ranks)
    by_role = [(role, [rank for of, rank in ranks if of == role]) for role in Role]
    return ", ".join(f"{role} rank {format_ranks(of_role)}" for role, of_role in by_role if of_role)
