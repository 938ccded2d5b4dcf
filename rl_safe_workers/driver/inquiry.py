"""Where the actors of a run are, asked while they still live, on the machine that they are on.

faulthandler answers for Python's stacks, torch's Flight Recorder for collectives, and the operating system for the
processes. A process that cannot answer is looked at by py-spy, if that is installed.
"""

from __future__ import annotations

import os
import re
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rl_safe_workers import env
from rl_safe_workers.driver.actors import GLOO_FLIGHTS, GLOO_REQUESTS, STACK_SIGNAL, stack_file
from rl_safe_workers.driver.cleanup import attempt
from rl_safe_workers.driver.flights import Record, read_flights
from rl_safe_workers.driver.stacks import Stack, py_spy
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.reaping.processes import run_processes

_LOOK_S = 0.1


@dataclass(slots=True, kw_only=True)
class Actor:
    """An actor's process, and what it has said."""

    rank_id: RankId
    pid: int
    status: str = "gone"
    """As psutil says, e.g. ``"sleeping"``, ``"stopped"``."""
    cpu_s: float | None = None
    source: str | None = None
    """Who has written the stacks: faulthandler, py-spy; None: nobody could."""
    text: str = ""
    stack: Stack | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the process answers nothing before it is continued."""
        return self.status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    def where(self) -> str:
        """What the verdict on a hang says of it."""
        notable = f", {self.status}" if self.is_stopped or self.status == psutil.STATUS_DISK_SLEEP else ""
        if self.stack is None or self.stack.place is None:
            return f"gives no stack, {self.status}"
        if not self.stack.is_in_a_call:
            return f"is in no call{notable}"
        return f"is {f'in {self.stack.op} ' if self.stack.op else ''}at {self.stack.place}{notable}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What the actors of a run have said, wherever they are."""

    actors: Sequence[Actor] = ()
    records: Mapping[int, Record] = field(default_factory=dict)
    """What the Flight Recorder tells, by training rank."""
    flights: Mapping[str, bytes] = field(default_factory=dict)
    """Its files by name, ``flight_<backend>_<rank>``: as torch writes them, compressed by zlib for their way."""
    homes: Mapping[RankId, str] = field(default_factory=dict)
    """The node of each rank, by name; empty where Ray is the run's own."""
    silent: Sequence[str] = ()
    """Nodes that have not answered."""
    more_flights: Sequence[Callable[[], Mapping[str, bytes]]] = ()
    """Give more of them when called: those of other nodes, which would keep the rest waiting."""


def ask_here(run_id: str, *, node: str | None = None, patience_s: float) -> Answers:
    """Asks the actors of a run that are on this machine, or on one node of several on it.

    Args:
        run_id: Marks the run's processes.
        node: Only those that bear the mark of this node, too.
        patience_s: Longest wait, in seconds. Whoever has not answered by then is told of as far as it is known.
    """
    inquiry = _Inquiry(run_id, node)
    # A look at a process may block with it, one for its variables, too.
    attempt("asking the actors", lambda: inquiry.ask(0.9 * patience_s), timeout_s=patience_s)
    flights = dict(inquiry.flights)
    return Answers(
        actors=inquiry.actors,
        records=read_flights(flights),
        flights={name: zlib.compress(contents, level=1) for name, contents in flights.items()},
    )


class _Inquiry:
    """What is known of the actors at any time; `ask` fills it in.

    Attributes:
        actors: Those found, trainers first; not what these have started.
        flights: Contents of Flight Recorder files, by name.
    """

    def __init__(self, run_id: str, node: str | None) -> None:
        self._run_id, self._node = run_id, node
        self._processes: dict[int, psutil.Process] = {}
        self.actors: list[Actor] = []
        self.flights: dict[str, bytes] = {}

    def ask(self, patience_s: float) -> None:
        """Gets what they have to say. Half of the time is for answers, the rest for looking at who gives none."""
        deadline_s = time.monotonic() + patience_s
        found = _find(self._run_id, self._node)
        self._processes = {process.pid: process for _, process in found}
        self.actors = [Actor(rank_id=rank_id, pid=process.pid) for rank_id, process in found]
        awaited: dict[Path, int] = {}
        for actor in self.actors:
            process = self._processes[actor.pid]
            with suppress(psutil.Error, OSError):
                actor.status, actor.cpu_s = process.status(), sum(process.cpu_times()[:2])
                if (file := self._stacks_of(actor)) is not None:
                    before = _size(file)
                    process.send_signal(STACK_SIGNAL)
                    if not actor.is_stopped:
                        awaited[file] = before
        folders = {folder for actor in self.actors if (folder := self._hang_dir(actor)) is not None}
        ids = {actor.rank_id for actor in self.actors if actor.is_stopped}
        stopped = {one.rank for one in ids if one.role is Role.TRAINER}
        for folder in folders:
            awaited |= dict.fromkeys(_request_flights(folder, stopped), -1)
        _settle(awaited, deadline_s - patience_s / 2)
        for folder in folders:
            for file in (file for prefix in (GLOO_FLIGHTS, env.NCCL_FLIGHTS) for file in folder.glob(f"{prefix}*")):
                if _size(file) > 0:
                    self.flights[file.name] = file.read_bytes()
        for actor in self.actors:
            self._read_stack(actor, deadline_s)

    def _hang_dir(self, actor: Actor) -> Path | None:
        try:
            return env.hang_dir(self._processes[actor.pid].environ())
        except psutil.Error:
            return None

    def _stacks_of(self, actor: Actor) -> Path | None:
        """The file that it writes its stacks to; None before it has begun to listen: the signal would kill it."""
        folder = self._hang_dir(actor)
        if folder is None:
            return None
        status = Path(f"/proc/{actor.pid}/status").read_text(encoding="utf-8")
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
        listens = caught is not None and bool(int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1)
        file = folder / stack_file(actor.rank_id)
        return file if listens and file.exists() else None

    def _read_stack(self, actor: Actor, deadline_s: float) -> None:
        with suppress(psutil.Error, OSError):
            file = self._stacks_of(actor)
            actor.text, actor.source = (
                (file.read_text(encoding="utf-8", errors="replace") if file else ""),
                "faulthandler",
            )
        if not actor.text:
            left_s = max(0.1, deadline_s - time.monotonic())
            actor.text, actor.source = py_spy(actor.pid, timeout_s=left_s), "py-spy"
        if not actor.text:
            actor.source = None
            return
        actor.stack = Stack.parse(actor.text)


def _find(run_id: str, node: str | None) -> list[tuple[RankId, psutil.Process]]:
    candidates: dict[RankId, dict[int, psutil.Process]] = {}
    for process in run_processes(run_id, node):
        with suppress(psutil.Error):
            if (rank_id := env.actor_of(process.environ())) is not None:
                candidates.setdefault(rank_id, {})[process.pid] = process
    found = []
    for rank_id, processes in candidates.items():
        for process in processes.values():
            with suppress(psutil.Error):
                if process.ppid() not in processes:
                    found.append((rank_id, process))
    return sorted(found, key=lambda one: one[0])


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
