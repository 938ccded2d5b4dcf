"""Looks at processes from outside, by py-spy and the operating system. They need not have loaded this package.

The processes answer no requests. So each is looked at twice, with a pause in between, and counts as waiting only if
both looks show the same wait. Nothing is changed in them. py-spy stops a process for a moment to read native frames.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rl_safe_workers.control.deadline import Deadline, attempt
from rl_safe_workers.diagnostics import proc_facts
from rl_safe_workers.diagnostics.proc_facts import DISK_SLEEP, GONE, STOPPED, ProcessFacts
from rl_safe_workers.diagnostics.stacks import dump
from rl_safe_workers.foreign_files import printable
from rl_safe_workers.frames import COLLECTIVES, Frame, collective_of, relative, telling_frame
from rl_safe_workers.root_cause import WITH_A_ROOT

_AT_ONCE = 8
"""Processes looked at at the same time."""
_LOOK_S = 20.0
"""Longest look of py-spy at one process, in seconds."""
_MOVES_PER_S = 10
"""A thread with more context switches per second than this does not stay in one wait."""
_BUSY_SHARE = 0.2
"""A thread that takes more than this share of a processor counts as working."""
_DUMP_CHARACTERS = 64 * 2**20
_TORCH_LOGGER = "torch/distributed/c10d_logger.py"
_RAY = "ray/_private/worker.py"
_RAY_WAITS = frozenset({"get", "get_objects", "wait"})
_RAY_CALL = "ray/_private/function_manager.py"
"""Its frames are those of a thread that runs an actor's method."""
_RAY_TITLE = re.compile(r"ray::\w+\.\w+")
"""Ray's title of the process of an actor that is in a call, e.g. ``ray::Trainer.train``."""
_RAY_LOOPS = "AsyncIO Thread"
"""The names of the threads that run the methods of an async actor, such as verl's workers, begin with this."""
_OF_THE_WORLD = frozenset({"init_process_group", "new_group", "new_subgroups", "destroy_process_group"})
"""Functions of torch that every rank of the world calls."""
_NATIVE_WAIT = re.compile(r"\b(c10d|gloo|nccl\w*)::|^nccl[A-Z]|\bncclComm")
"""Native frames of a process that is in a collective, or waits for one that runs in the background."""
_NATIVE_DEVICE = re.compile(
    r"^(cuda(Stream|Device|Event)Synchronize|cu(Stream|Ctx|Event)Synchronize|cudaMemcpy\w*|cuMemcpy\w*)"
)
"""Native frames of a process that waits for its GPU."""
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "multiprocessing/resource_tracker")


class Standing(StrEnum):
    """The state of a rank, as it matters to the ranks that may wait for it."""

    GONE = "gone"
    STOPPED = "stopped"
    ASLEEP = "in uninterruptible sleep"
    WAITS = "waits"
    """In a collective, in a wait for one, or in a send or receive."""
    DEVICE = "waits for its GPU"
    """The kernel that it waits for is not known. It may be a collective's."""
    CALLS = "waits for a call"
    """In ``ray.get`` or ``ray.wait``, or in a coroutine: it waits for another actor."""
    IDLE = "is in no call"
    """An actor that nobody has called."""
    ELSEWHERE = "elsewhere"
    """In no collective, as its frames show."""
    UNKNOWN = "unknown"
    """Nobody can tell whether it waits for others."""


class Members(StrEnum):
    """The members of a collective's group."""

    WORLD = "the world"
    SUBGROUP = "a group"
    UNKNOWN = "a group that is not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A process, as an onlooker sees it.

    Example: ``Sighting(facts=look_at(4711), standing=Standing.STOPPED, global_rank=1)``
    """

    facts: ProcessFacts
    standing: Standing
    global_rank: int | None = None
    """Its rank in the world, by its environment; None if that does not say."""
    actor: str = ""
    """Class of a Ray actor; empty for other processes."""
    frames: Sequence[Frame] = ()
    """Frames of the thread that counts, innermost first; native ones have line 0."""
    op: str | None = None
    members: Members = Members.UNKNOWN
    peer: int | None = None
    """Global rank that a receive of the world waits for."""
    stays: bool = True
    """True if it was in the same wait in both looks."""
    works: bool = False
    """True if the thread that counts took processor time between the looks."""
    doubt: str = ""
    """The reason why facts are missing; empty if none are."""

    @property
    def name(self) -> str:
        """Returns the rank or the actor with its process. Trainers and engines both have a rank 1, on Ray."""
        pid = f"process {self.facts.pid}"
        if self.global_rank is not None:
            return f"rank {self.global_rank}{f' of {self.actor}' if self.actor else ''} ({pid})"
        return f"actor {self.actor} ({pid})" if self.actor else pid

    @property
    def place(self) -> Frame | None:
        """Returns the innermost line of Python code that tells where it is."""
        return telling_frame([frame for frame in self.frames if frame.line])

    @property
    def wait(self) -> str:
        """Returns the collective that it waits in, e.g. ``"all_reduce of the world"``."""
        op = self.op or "a collective in the background"
        if self.peer is not None:
            return f"{op} from rank {self.peer}"
        return op if self.members is Members.UNKNOWN else f"{op} of {self.members}"

    def where(self) -> str:
        """Returns the end of a sentence that begins with the rank."""
        at = "" if self.place is None else f" at {self.place}"
        match self.standing:
            case Standing.GONE:
                return self.facts.describe_end()
            case Standing.STOPPED:
                return f"is stopped ({'by a debugger' if self.facts.state == 't' else 'SIGSTOP'}){at}"
            case Standing.ASLEEP:
                return f"is in uninterruptible sleep{at}: {self.facts.describe_wait()}"
            case Standing.WAITS:
                return f"waits in {self.wait}{at}"
            case Standing.DEVICE:
                return f"waits for its GPU{at}"
            case Standing.IDLE:
                return "is in no call"
            case Standing.CALLS:
                return f"waits for a call of another actor{at}" if at else "waits in a coroutine, which is on no thread"
            case Standing.UNKNOWN:
                return f"may wait for others or not{at}: not known, because {self.doubt}"
        wait = self.facts.describe_wait()
        return f"is{' working' if self.works else ''}{at or ' at no line that is known'}{f': {wait}' if wait else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """One look at a process."""

    facts: ProcessFacts
    """State, wait and processor time are of the thread that counts."""
    at_s: float
    thread: int | None = None
    """The kernel's id of the thread that counts."""
    frames: Sequence[Frame] = ()
    op: str | None = None
    members: Members = Members.UNKNOWN
    peer: int | None = None
    is_idle: bool = False
    calls: bool = False
    """True if the thread that counts waits for another actor."""
    complaint: str = ""


def find_ranks(pids: Sequence[int]) -> list[int]:
    """Returns the ranks among processes and their children.

    Replaces a launcher by its ranks. Adds the other ranks of the same job on this machine.

    Args:
        pids: Processes, of ranks or of a launcher such as torchrun.
    """
    found: dict[int, None] = {}
    for pid in pids:
        found |= dict.fromkeys(_ranks_at(pid, is_alone=len(pids) == 1))
    return [*found, *_peers(found)]


def _peers(found: Collection[int]) -> list[int]:
    """Returns the other ranks on this machine of the job that the found processes belong to.

    Two jobs may use the same address one after the other. So a rank counts only if exactly one process has it.
    """
    jobs = {job for pid in found if (job := _job(pid))}
    if len(jobs) != 1:
        return []
    users, taken = {proc_facts.look_at(pid).user for pid in found}, {_rank(pid) for pid in found}
    candidates = [pid for pid in proc_facts.all_processes() if _job(pid) in jobs and _rank(pid) not in taken]
    peers = [pid for pid in _topmost(candidates) if proc_facts.look_at(pid).user in users]
    counts = Counter(map(_rank, peers))
    return [pid for pid in peers if counts[_rank(pid)] == 1]


def _job(pid: int) -> tuple[str, ...]:
    """Returns the variables that all ranks of a job share; empty if the process is no rank."""
    variables = proc_facts.variables_of(pid) or {}
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    return tuple(variables[name] for name in names) if {*names, "RANK"} <= variables.keys() else ()


def _rank(pid: int) -> str | None:
    return (proc_facts.variables_of(pid) or {}).get("RANK")


def _ranks_at(pid: int, *, is_alone: bool) -> list[int]:
    if _rank(pid) is not None:
        return [pid]
    below = proc_facts.descendants_of(pid)
    if ranks := _topmost([one for one in below if _rank(one) is not None]):
        # A rank that has ended has no environment any more.
        parents = {proc_facts.look_at(one).parent for one in ranks}
        dead = [one for one in below if (facts := proc_facts.look_at(one)).state in GONE and facts.parent in parents]
        return [*ranks, *dead]
    workers = [one for one in below if _is_worker(one)] if is_alone else []
    return workers if len(workers) > 1 else [pid]


def _is_worker(pid: int) -> bool:
    facts = proc_facts.look_at(pid)
    if facts.state in GONE:
        return True
    return proc_facts.uses_torch(pid) and not any(helper in facts.command for helper in _HELPERS)


def _topmost(pids: Iterable[int]) -> list[int]:
    """Leaves out the child processes of ranks, which inherit a rank's environment."""
    ranks = {pid: _rank(pid) for pid in pids}
    found = []
    for pid in ranks:
        parent = proc_facts.look_at(pid).parent
        while parent > 1 and ranks.get(parent) != ranks[pid]:
            parent = proc_facts.look_at(parent).parent
        if parent <= 1:
            found.append(pid)
    return found


def observe(
    pids: Sequence[int], *, patience_s: float, pause_s: float = 1.0, actors: Mapping[int, str] | None = None
) -> list[Sighting]:
    """Looks at processes twice, and returns where each one is. Changes nothing in them; never raises.

    Args:
        pids: The processes of ranks.
        patience_s: Longest wait, in seconds. A process that cannot be looked at by then is `Standing.UNKNOWN`.
        pause_s: Seconds between the two looks.
        actors: Classes of Ray actors, by process id.
    """
    deadline = Deadline.after(patience_s)
    first = _look_at_all(pids, deadline.share(0.3))
    time.sleep(pause_s)
    second = _look_at_all(pids, deadline.share(0.4))
    unclear = [pid for pid in pids if pid in second and _needs_native(second[pid])]
    native = _in_parallel(unclear, lambda pid: _look(pid, "--native", deadline=deadline), deadline)
    sightings = _with_ranks(
        [_sight(pid, first.get(pid), second.get(pid), native.get(pid), (actors or {}).get(pid, "")) for pid in pids]
    )
    still = {pid for pid in pids if pid in first and pid in second and _has_not_run(first[pid], second[pid])}
    same = {pid for pid in pids if pid in first and pid in second and _is_in_one_call(first[pid], second[pid])}
    return sorted(
        _with_polls(sightings, still=still, same=same),
        key=lambda one: (one.global_rank is None, one.global_rank, one.facts.pid),
    )


def _look_at_all(pids: Sequence[int], deadline: Deadline) -> dict[int, _Look]:
    return _in_parallel(pids, lambda pid: _look(pid, "--nonblocking", deadline=deadline), deadline)


def _in_parallel(pids: Sequence[int], look: Callable[[int], _Look], deadline: Deadline) -> dict[int, _Look]:
    """Looks at each process on its own thread, because a look at one that hangs in the kernel may never return."""
    found: dict[int, _Look] = {}

    def one(pid: int) -> None:
        attempt(
            f"looking at process {pid}",
            lambda: found.update({pid: look(pid)}),
            timeout_s=max(0.1, deadline.remaining().total_seconds()),
        )

    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        list(pool.map(one, pids))
    return dict(found)


def _look(pid: int, how: str, *, deadline: Deadline) -> _Look:
    at_s = time.monotonic()
    facts = proc_facts.look_at(pid)
    look = _Look(facts=facts, at_s=at_s)
    if facts.state in GONE:
        return look
    timeout_s = max(0.1, min(_LOOK_S, deadline.remaining().total_seconds()))
    text, complaint = dump(pid, how, "--json", "--locals", timeout_s=timeout_s)
    if complaint:
        return replace(look, complaint=printable(complaint))
    if len(text) > _DUMP_CHARACTERS:
        return replace(look, complaint="its stacks are too long")
    look = _read(look, json.loads(text))
    if look.thread in (None, pid):
        return look
    return replace(look, facts=proc_facts.look_at(pid, look.thread), at_s=time.monotonic())


def _read(look: _Look, threads: Sequence[Mapping[str, Any]]) -> _Look:
    """Finds the thread that counts: one in a collective, else one that runs an actor's method, else the main one."""
    nobody: Mapping[str, Any] = {"frames": []}
    main = next((thread for thread in threads if thread.get("os_thread_id") == look.facts.pid), None) or next(
        (thread for thread in threads if thread.get("thread_name") == "MainThread"), nobody
    )
    in_loop = _is_in_rays_loop(_frames(main["frames"]))
    chosen = next(
        (thread for thread in [main, *threads] if collective_of(_frames(thread["frames"]))),
        next((thread for thread in threads if in_loop and _runs_a_method(thread)), main),
    )
    op, members, peer = _wait_of(chosen["frames"])
    frames = _frames(chosen["frames"])
    calls = op is None and any(one.file.endswith(_RAY) and one.function in _RAY_WAITS for one in frames)
    runs_none = in_loop and not any(map(_runs_a_method, threads))
    awaits = runs_none and _RAY_TITLE.match(look.facts.command) is not None
    return replace(
        look,
        thread=chosen.get("os_thread_id"),
        frames=() if awaits else frames,
        op=op,
        members=members,
        peer=peer,
        is_idle=runs_none and not awaits,
        calls=calls or awaits,
    )


def _runs_a_method(thread: Mapping[str, Any]) -> bool:
    """Returns True if a thread of a Ray actor runs one of its methods. A waiting coroutine runs on no thread."""
    frames = _frames(thread["frames"])
    if any(frame.file.endswith(_RAY_CALL) for frame in frames):
        return True
    in_a_loop = str(thread.get("thread_name")).startswith(_RAY_LOOPS)
    return in_a_loop and any(frame.is_telling and frame.line for frame in frames)


def _frames(frames: Sequence[Mapping[str, Any]]) -> list[Frame]:
    return [
        Frame(
            file=printable(relative(str(frame["filename"]))), line=frame["line"], function=printable(str(frame["name"]))
        )
        for frame in frames
    ]


def _is_in_rays_loop(main: Sequence[Frame]) -> bool:
    """Returns True if the main thread of a Ray worker runs no method itself."""
    python = [frame for frame in main if frame.line]
    return bool(python) and python[0].file.endswith(_RAY) and python[0].function.endswith("main_loop")


def _wait_of(frames: Sequence[Mapping[str, Any]]) -> tuple[str | None, Members, int | None]:
    """Returns the collective that frames are in, its members, and the rank that a receive waits for."""
    outermost = max(
        (index for index, frame in enumerate(frames) if str(frame["filename"]).endswith(COLLECTIVES)), default=None
    )
    if outermost is None:
        return None, Members.UNKNOWN, None
    op = str(frames[outermost]["name"])
    if op in _OF_THE_WORLD:
        return op, Members.WORLD, None
    given = _locals(frames[outermost])
    members = _members(frames[outermost + 1 : outermost + 2], given)
    source = given.get("src") if op in ("recv", "irecv") and members is Members.WORLD else None
    return op, members, int(source) if source and source.isdecimal() else None


def _members(outer: Sequence[Mapping[str, Any]], given: Mapping[str, str]) -> Members:
    """Returns the members of a collective, the world or a subgroup, from the arguments of the call.

    torch's own functions replace a missing group by the default group. So the arguments in the decorator's frame count.
    """
    if outer and str(outer[0]["filename"]).endswith(_TORCH_LOGGER):
        arguments = [_locals(outer[0]).get(name) for name in ("args", "kwargs")]
        if None in arguments or any("..." in str(one) for one in arguments):
            return Members.UNKNOWN
        return Members.SUBGROUP if any("ProcessGroup" in str(one) for one in arguments) else Members.WORLD
    return Members.WORLD if given.get("group") == "None" else Members.UNKNOWN


def _locals(frame: Mapping[str, Any]) -> dict[str, str]:
    return {str(one["name"]): str(one["repr"]) for one in frame.get("locals") or () if one.get("repr") is not None}


def _needs_native(look: _Look) -> bool:
    """Returns True if Python's frames show no collective, so that only native ones can: ``work.wait()`` is in C++."""
    return look.op is None and not (look.is_idle or look.calls) and look.facts.state not in GONE | STOPPED | DISK_SLEEP


def _sight(pid: int, first: _Look | None, second: _Look | None, native: _Look | None, actor: str) -> Sighting:
    if second is None:
        facts = first.facts if first is not None else ProcessFacts(pid=pid, state="?")
        standing = Standing.ASLEEP if facts.state in DISK_SLEEP else Standing.UNKNOWN
        doubt = "the process could not be looked at in time"
        return Sighting(facts=facts, standing=standing, actor=actor, global_rank=facts.number("RANK"), doubt=doubt)
    facts, frames = second.facts, second.frames
    rate = _rates(first, second)
    sighting = Sighting(
        facts=facts,
        standing=Standing.ELSEWHERE,
        actor=actor,
        global_rank=facts.number("RANK"),
        frames=frames,
        op=second.op,
        members=second.members,
        peer=second.peer,
        stays=first is not None and first.frames == frames and rate[0] <= _MOVES_PER_S,
        works=rate[1] > _BUSY_SHARE,
    )
    if facts.state in GONE:
        return replace(sighting, standing=Standing.GONE)
    if facts.state in STOPPED:
        return replace(sighting, standing=Standing.STOPPED)
    if facts.state in DISK_SLEEP and first is not None and first.facts.state in DISK_SLEEP and rate[0] == 0:
        return replace(sighting, standing=Standing.ASLEEP)
    if second.op is not None:
        return replace(sighting, standing=Standing.WAITS)
    if second.is_idle:
        return replace(sighting, standing=Standing.IDLE)
    if second.calls:
        return replace(sighting, standing=Standing.CALLS)
    return _by_native_frames(sighting, second, native)


def _by_native_frames(sighting: Sighting, second: _Look, native: _Look | None) -> Sighting:
    if second.complaint:
        return replace(sighting, standing=Standing.UNKNOWN, doubt=second.complaint)
    if native is not None and native.op is not None:
        wait = replace(sighting, op=native.op, members=native.members, peer=native.peer, frames=native.frames)
        return replace(wait, standing=Standing.WAITS, stays=False)
    if native is not None and any(not frame.line for frame in native.frames):
        names = [frame.function for frame in native.frames if not frame.line]
        if any(map(_NATIVE_WAIT.search, names)):
            return replace(sighting, standing=Standing.WAITS)
        return replace(sighting, standing=Standing.DEVICE) if any(map(_NATIVE_DEVICE.search, names)) else sighting
    if sighting.facts.system_call in ("futex", "") and not sighting.works:
        why = native.complaint if native is not None and native.complaint else "py-spy shows no native frames"
        return replace(sighting, standing=Standing.UNKNOWN, doubt=why)
    return sighting


def _rates(first: _Look | None, second: _Look) -> tuple[float, float]:
    """Returns the context switches per second of the thread that counts, and its share of a processor."""
    if first is None or first.facts.state in GONE or first.thread != second.thread:
        return 0.0, 0.0
    passed_s = max(0.1, second.at_s - first.at_s)
    ticks = second.facts.ticks - first.facts.ticks
    return (second.facts.switches - first.facts.switches) / passed_s, ticks / os.sysconf("SC_CLK_TCK") / passed_s


def _has_not_run(first: _Look, second: _Look) -> bool:
    """Returns True if the thread that counts has not run between the looks."""
    before, after = first.facts, second.facts
    return (
        (first.thread, first.frames) == (second.thread, second.frames)
        and (before.switches, before.ticks) == (after.switches, after.ticks)
        and second.thread is not None
    )


def _is_in_one_call(first: _Look, second: _Look) -> bool:
    """Returns True if both looks show the same call of a collective that cannot end before all ranks have come."""
    return (
        second.op is not None
        and second.op not in WITH_A_ROOT
        and (second.members, second.peer) == (Members.WORLD, None)
        and (first.thread, first.op, _callers(first.frames)) == (second.thread, second.op, _callers(second.frames))
    )


def _callers(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Returns the frames outside of the collective. Frames are innermost first."""
    inside = [index for index, frame in enumerate(frames) if frame.file.endswith(COLLECTIVES)]
    return frames[inside[-1] + 1 :] if inside else frames


def _with_polls(sightings: Sequence[Sighting], *, still: Collection[int], same: Collection[int]) -> Sequence[Sighting]:
    """Marks ranks that poll in a collective as staying in one wait, if a rank outside the collective stands still.

    The collective cannot end without that rank. So both looks have seen the same wait, however often its thread has
    woken up.

    Args:
        sightings: All processes.
        still: Ids of the processes that have not run between the looks.
        same: Ids of the processes that both looks show in the same call of a collective of the whole world.
    """
    ranks = [one.global_rank for one in sightings if one.global_rank is not None]
    outside = [one for one in sightings if one.standing is Standing.ELSEWHERE and one.global_rank is not None]
    if len(set(ranks)) < len(ranks) or not any(one.facts.pid in still for one in outside):
        return sightings
    return [replace(one, stays=True) if one.facts.pid in same else one for one in sightings]


def _with_ranks(sightings: Sequence[Sighting]) -> list[Sighting]:
    """Gives the only missing rank to the only process that has ended, because a zombie has no environment any more."""
    sizes = {one.facts.number("WORLD_SIZE") for one in sightings} - {None}
    ranks = {one.global_rank for one in sightings}
    dead = [one for one in sightings if one.standing is Standing.GONE and one.global_rank is None]
    (size,) = sizes if len(sizes) == 1 else (None,)
    missing = [] if size is None or size > 10**6 else [rank for rank in range(size) if rank not in ranks]
    if len(missing) == len(dead) == 1:
        return [replace(one, global_rank=missing[0]) if one is dead[0] else one for one in sightings]
    return list(sightings)
