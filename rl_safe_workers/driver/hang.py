"""The verdict on a run that hangs: who has arrived, who has not, and where each missing rank is.

Asks the actors while they still live: faulthandler answers for Python's stacks, torch's Flight Recorder for
collectives, the operating system and Ray for the processes. What they say is kept, and summed up in one line.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import state as ray_state

from rl_safe_workers import env
from rl_safe_workers.driver.actors import GLOO_FLIGHTS, GLOO_REQUESTS, IN_VAIN, STACK_SIGNAL, stack_file
from rl_safe_workers.driver.cleanup import attempt
from rl_safe_workers.driver.flights import Work, read_flights, waiting_ranks, works_waited_in
from rl_safe_workers.driver.nodes import JOINING, LOOK_AT_NODES, NODE_AGENTS
from rl_safe_workers.driver.stacks import Stack, py_spy, relative
from rl_safe_workers.errors import CommunicatorError, PhaseTimeoutError, RankError, format_ranks
from rl_safe_workers.lifecycle import Role
from rl_safe_workers.reaping.processes import run_processes

logger = logging.getLogger(__name__)

Who = tuple[str, int]
"""Role and rank."""

_WAITED_FOR_BY_THE_DRIVER = (
    "the driver", "the placement group", "the making of the model", JOINING, LOOK_AT_NODES, NODE_AGENTS,
)  # fmt: skip
"""Groups of a PhaseTimeoutError that are no ranks."""
_MEMBERS = re.compile(r"\[([\d, ]+)\]")
"""Training ranks in the name of a group."""
_ALSO_MISSING = re.compile(r"\(nor ([^;)]+)")
_RANK = re.compile(r"(trainer|rollout) rank (\d+)")

_LOOK_S = 0.1


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


@dataclass(slots=True, kw_only=True)
class Actor:
    """An actor's process on this machine, and what it has said."""

    who: Who
    process: psutil.Process
    status: str = "gone"
    """As psutil says, e.g. ``"sleeping"``, ``"stopped"``."""
    cpu_s: float | None = None
    source: str | None = None
    """Who has written the stacks: faulthandler, py-spy; None: nobody could."""
    text: str = ""
    stack: Stack | None = None

    def where(self) -> str:
        """What the verdict says of it."""
        notable = f", {self.status}" if _is_stopped(self) or self.status == psutil.STATUS_DISK_SLEEP else ""
        if self.stack is None or self.stack.place is None:
            return f"gives no stack, {self.status}"
        if not self.stack.is_in_a_call:
            return f"is in no call{notable}"
        return f"is {f'in {self.stack.op} ' if self.stack.op else ''}at {self.stack.place}{notable}"


def collect_evidence(
    error: BaseException, *, run_id: str, folder: Path, trainers: int, patience_s: float
) -> str | None:
    """Asks every actor of a run that has failed where it is, if the failure is about ranks that did not come.

    To be called before the actors are killed. Only processes on this machine can be asked; those that Ray has started
    elsewhere are listed in the verdict as such. Never raises.

    Args:
        error: What the run has failed with. Where it names all that are in a call, and the Flight Recorder shows that
            some of them only wait for the others, it names these others from then on: on a GPU nobody else can tell.
        run_id: Marks the run's processes.
        folder: The run's; gets ``hang/`` with ``verdict.json``, ``stack_<role>_<rank>.txt`` for each actor here, and
            of trainers ``flight_<backend>_<rank>``, what the Flight Recorder has, as torch writes it.
        trainers: Number of training ranks.
        patience_s: Longest wait, in seconds.

    Returns:
        The verdict, one line; None if the error is of another kind, or a wait of the driver alone.
    """
    verdicts: list[str | None] = []
    # Leaves the thread time to write what it has before it is left behind.
    deadline_s = time.monotonic() + 0.8 * patience_s
    attempt(
        "collecting the evidence of the hang",
        lambda: verdicts.append(_collect(error, run_id, folder, trainers, deadline_s)),
        timeout_s=patience_s,
    )
    return verdicts[0] if verdicts else None


def _collect(error: BaseException, run_id: str, folder: Path, trainers: int, deadline_s: float) -> str | None:
    wait = wait_of(error, trainers)
    if wait is None:
        return None
    target = folder / "hang"
    shutil.rmtree(target, ignore_errors=True)  # of an earlier run by the same name
    target.mkdir(parents=True)
    actors = find_actors(run_id)
    attempt("asking the actors", lambda: _ask(actors, target, deadline_s), timeout_s=_left(deadline_s))
    in_ray: list[dict[str, Any]] = []
    attempt("asking Ray for its actors", lambda: in_ray.extend(_ray_actors()), timeout_s=_left(deadline_s) / 2)
    busy = frozenset(actor.who for actor in actors if actor.stack is None or actor.stack.is_in_a_call)
    missing = busy - wait.arrived if wait.missing is None else wait.missing
    records = read_flights(target)
    works = works_waited_in(records, _training_ranks(missing))
    waiting = {(Role.TRAINER.value, rank) for rank in waiting_ranks(works)} & missing
    if waiting and waiting < missing:
        missing = missing - waiting
        works = works_waited_in(records, _training_ranks(missing))
        wait = replace(wait, missing=missing, arrived=wait.arrived | waiting)
        _blame(error, missing)
    elsewhere = sum(not actor["is_here"] for actor in in_ray)
    line = verdict(wait, missing, actors, works, elsewhere=elsewhere, target=target)
    found = {
        "verdict": line,
        "error": f"{type(error).__name__}: {error}",
        "wait": {
            "phase": wait.phase, "group": wait.group, "waited_s": wait.waited_s,
            "arrived": sorted(wait.arrived), "missing": sorted(missing),
        },
        "works": {rank: asdict(work) for rank, work in works.items()},
        "actors": [
            {
                "role": actor.who[0], "rank": actor.who[1], "pid": actor.process.pid, "status": actor.status,
                "cpu_s": actor.cpu_s, "stack_from": actor.source,
                "stack": None if actor.stack is None else asdict(actor.stack),
            }
            for actor in actors
        ],
        "ray": in_ray,
    }  # fmt: skip
    (target / "verdict.json").write_text(json.dumps(found, indent=1))
    return line


def _training_ranks(who: Collection[Who]) -> set[int]:
    return {rank for role, rank in who if role == Role.TRAINER}


def _blame(error: BaseException, missing: Collection[Who]) -> None:
    """Makes a driver's error name those who are missing; one of the ranks' own knows better."""
    groups = {f"the {role}s": [rank for of, rank in missing if of == role] for role in Role}
    if isinstance(error, PhaseTimeoutError) and error.group in groups:
        group = next(group for group, ranks in groups.items() if ranks)
        error.blame(group, groups[group])


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


def find_actors(run_id: str) -> list[Actor]:
    """Finds the processes on this machine that are actors of the run, trainers first; not what these have started."""
    candidates: dict[Who, dict[int, psutil.Process]] = {}
    for process in run_processes(run_id):
        with suppress(psutil.Error):
            if (who := env.actor_of(process.environ())) is not None:
                candidates.setdefault(who, {})[process.pid] = process
    found = []
    for who, processes in candidates.items():
        for process in processes.values():
            with suppress(psutil.Error):
                if process.ppid() not in processes:
                    found.append(Actor(who=who, process=process))
    return sorted(found, key=lambda actor: (actor.who[0] != Role.TRAINER, actor.who[1]))


def _ask(actors: Sequence[Actor], target: Path, deadline_s: float) -> None:
    """Gets stacks and Flight Recorder files into the target folder. Half of the time is for answers."""
    awaited: dict[Path, int] = {}
    for actor in actors:
        with suppress(psutil.Error, OSError):
            actor.status, actor.cpu_s = actor.process.status(), sum(actor.process.cpu_times()[:2])
            if (file := _stacks_of(actor)) is not None:
                before = _size(file)
                actor.process.send_signal(STACK_SIGNAL)
                if not _is_stopped(actor):
                    awaited[file] = before
    folders = {folder for actor in actors if (folder := _hang_dir(actor)) is not None}
    stopped = {actor.who[1] for actor in actors if actor.who[0] == Role.TRAINER and _is_stopped(actor)}
    for folder in folders:
        awaited |= dict.fromkeys(_request_flights(folder, stopped), -1)
    _settle(awaited, time.monotonic() + _left(deadline_s) / 2)
    for folder in folders:
        for file in (file for prefix in (GLOO_FLIGHTS, env.NCCL_FLIGHTS) for file in folder.glob(f"{prefix}*")):
            if _size(file) > 0:
                shutil.copyfile(file, target / file.name)
    for actor in actors:
        _read_stack(actor, deadline_s)
        (target / stack_file(*actor.who)).write_text(actor.text or f"no stack: the process is {actor.status}\n")


def _is_stopped(actor: Actor) -> bool:
    """Whether the process answers nothing before it is continued."""
    return actor.status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def _hang_dir(actor: Actor) -> Path | None:
    try:
        return env.hang_dir(actor.process.environ())
    except psutil.Error:
        return None


def _stacks_of(actor: Actor) -> Path | None:
    """The file that the actor writes its stacks to; None before it has begun to listen: the signal would kill it."""
    folder = _hang_dir(actor)
    if folder is None:
        return None
    status = Path(f"/proc/{actor.process.pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    listens = caught is not None and bool(int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1)
    file = folder / stack_file(*actor.who)
    return file if listens and file.exists() else None


def _request_flights(folder: Path, stopped: Collection[int]) -> list[Path]:
    """Asks each trainer that listens for what its Flight Recorder has; returns the files that will tell."""
    awaited = []
    for requests, flights in ((GLOO_REQUESTS, GLOO_FLIGHTS), (env.NCCL_REQUESTS, env.NCCL_FLIGHTS)):
        for pipe in folder.glob(f"{requests}*.pipe"):
            with suppress(OSError):  # nobody listens any more
                rank = int(pipe.stem.removeprefix(requests))
                descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                os.write(descriptor, b"1")
                os.close(descriptor)
                if rank not in stopped:
                    awaited.append(folder / f"{flights}{rank}")
    return awaited


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else -1


def _settle(awaited: Mapping[Path, int], deadline_s: float) -> None:
    """Waits until each file has outgrown its former size, and none has grown since the last look."""
    last: list[int] = []
    while time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
        sizes = [_size(file) for file in awaited]
        if sizes == last and all(size > before for size, before in zip(sizes, awaited.values(), strict=True)):
            return
        last = sizes


def _read_stack(actor: Actor, deadline_s: float) -> None:
    with suppress(psutil.Error, OSError):
        file = _stacks_of(actor)
        actor.text, actor.source = (file.read_text() if file else ""), "faulthandler"
    if not actor.text:
        actor.text, actor.source = py_spy(actor.process.pid, timeout_s=_left(deadline_s)), "py-spy"
    if not actor.text:
        actor.source = None
        return
    actor.stack = Stack.parse(actor.text)


def _ray_actors() -> list[dict[str, Any]]:
    """Ray's list of this driver's actors, which needs no dashboard."""
    if not ray.is_initialized():
        return []
    context = ray.get_runtime_context()
    job, node = context.get_job_id(), context.get_node_id()
    return [
        {
            "class": actor["ActorClassName"], "state": actor["State"], "pid": actor["Pid"],
            "address": actor["Address"]["IPAddress"], "is_here": actor["Address"]["NodeID"] == node,
        }
        for actor in ray_state.actors().values()
        if actor["JobID"] == job
    ]  # fmt: skip


def verdict(
    wait: Wait,
    missing: Collection[Who],
    actors: Sequence[Actor],
    works: Mapping[int, Work],
    *,
    elsewhere: int,
    target: Path,
) -> str:
    """Sums the evidence up in one line.

    Args:
        wait: Who waited for whom.
        missing: Who has not come.
        actors: Those on this machine.
        works: The collective that a training rank waits in.
        elsewhere: How many actors are on other machines.
        target: Where the evidence is.
    """
    # Whoever is missing may be in nothing: what the others wait in says more.
    ranks = sorted(works, key=lambda rank: ((Role.TRAINER.value, rank) in missing, rank))
    ops = [str(works[rank]) for rank in ranks]
    waiting = sorted(actors, key=lambda actor: actor.who in missing)
    ops += [actor.stack.op for actor in waiting if actor.stack is not None and actor.stack.op is not None]
    where = {actor.who: actor.where() for actor in actors}
    places: dict[str, set[Who]] = {}
    for who in missing:
        places.setdefault(where.get(who, "has no process on this machine"), set()).add(who)
    parts = [
        "hang: " + ", ".join([*([f"phase {wait.phase}"] if wait.phase else []), wait.group, *ops[:1]]) + ": "
        f"{_attendance(wait, missing)}",
        *(f"{_names(of_place)} {place}" for place, of_place in sorted(places.items(), key=lambda item: min(item[1]))),
        *([f"{elsewhere} actors are on other machines"] if elsewhere else []),
        f"evidence in {relative(str(target))}",
    ]
    return "; ".join(parts)


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
