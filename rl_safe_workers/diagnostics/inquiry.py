"""Asks the ranks of a run where they are, while their processes still live. Runs on each rank's own machine.

A thread of each process answers with Python's stacks and torch's Flight Recorder. The operating system tells the rest.
If that thread cannot run, the process gets `STACK_SIGNAL`. If there is still no answer, py-spy looks, if installed.
"""

from __future__ import annotations

import os
import re
import signal
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from rl_safe_workers import env
from rl_safe_workers.control.deadline import Deadline, attempt
from rl_safe_workers.diagnostics.answering import STACK_SIGNAL
from rl_safe_workers.diagnostics.awaited_children import Child, children_of, waits_for_a_child
from rl_safe_workers.diagnostics.endings import Ending, Signs, ending_of, look_around
from rl_safe_workers.diagnostics.flight_recorder import Record, read_flights
from rl_safe_workers.diagnostics.log_lines import Fault
from rl_safe_workers.diagnostics.proc_facts import DISK_SLEEP, look_at, told_of_exit
from rl_safe_workers.diagnostics.rank_files import (
    GLOO_FLIGHTS,
    events_of,
    kills_file,
    last_alive_s,
    rank_of_pipe,
    rank_of_place,
    read_exit,
    read_failure,
    read_fatal,
    read_phase,
    read_place,
    stack_file,
)
from rl_safe_workers.diagnostics.stacks import CallFrame, Stack, is_cut_off, py_spy
from rl_safe_workers.diagnostics.stopped import read_stops
from rl_safe_workers.diagnostics.thread_waits import wait_of_thread
from rl_safe_workers.errors import OUTSIDE, RunError, during
from rl_safe_workers.foreign_files import read_foreign
from rl_safe_workers.frames import collective_of, telling_frame
from rl_safe_workers.lifecycle import unix_now
from rl_safe_workers.ranks import RankId, Role, trainer_id
from rl_safe_workers.reaping.processes import run_processes
from rl_safe_workers.root_cause import STORE_BARRIER, Spot

_LOOK_S = 0.1
_KERNEL_LOOK_S = 0.5
_GONE = "gone"
_UNKNOWN = "unknown"
_Version = tuple[int, int, int] | None
_FLIGHT_BYTES, _STACK_BYTES = 2**28, 2**24
"""Size limits of what is read of a rank's files."""


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """A rank's process: the host's facts about it, and its answers.

    Example: ``RankProcess(rank_id=trainer_id(1), pid=4711, folder=Path("/tmp/my_run"))``
    """

    rank_id: RankId
    pid: int
    folder: Path | None = None
    """Where it leaves its answers; None: in the folder that its environment names (`env.HANG_DIR`)."""
    poll: Callable[[], int | None] | None = None
    """Returns the exit code once the process has ended, as `subprocess.Popen.poll`; None if nobody can tell."""
    call_frame: CallFrame | None = None
    """The frame in which its calls run; None: the frame given for the whole inquiry."""
    never_ends: bool = False
    """True if no exception ends it, as with an actor of Ray. So if it has ended, something has killed it."""
    exit_code: int | None = None
    """Negative for a signal; None if it has not ended, or nobody can tell."""
    exited: int | None = None
    """The status with which it has called `os._exit`; None if it has not."""
    status: str = _UNKNOWN
    """psutil's word, e.g. ``"sleeping"``, ``"stopped"``; ``"gone"`` if there is no process, ``"unknown"`` if nobody
    has looked."""
    cpu_s: float | None = None
    source: str | None = None
    """The writer of the stacks: ``"rank"`` for the process itself, or ``"py-spy"``. None if there are no stacks."""
    text: str = ""
    stack: Stack | None = None
    last_place: str | None = None
    """The line of code that it noted last while it was able to."""
    phase: str | None = None
    """The phase that it has noted; None: outside of phases, or it notes none."""
    ending: Ending | None = None
    """Why it has ended, as far as its machine knows; None if it lives, or nobody has looked."""
    children: Sequence[Child] = ()
    """Processes that it has started and may wait for, the telling ones first; empty if it waits for none."""
    waits: Sequence[str] = ()
    """The ends of sentences about what its call waits for within the process."""
    events: Sequence[str] = ()
    """Events that may hold it up, each as the end of a sentence, oldest first; see `answering.note_event`."""
    kernel_wait: str = ""
    """The end of a sentence about its wait in the kernel, if it sleeps there and nothing can interrupt it."""

    @property
    def is_gone(self) -> bool:
        """True if the process has ended."""
        return self.exit_code is not None or self.status in (_GONE, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)

    @property
    def is_stopped(self) -> bool:
        """True if the process is stopped. It answers nothing until it is continued."""
        return self.status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    @property
    def waits_for_others(self) -> bool:
        """True if its call waits for other ranks, as its stack shows."""
        return self.stack is not None and self.stack.waits_for_others

    def spot(self, phase: str | None) -> Spot:
        """Returns where it waits.

        Args:
            phase: The phase that the host waits in. A phase that the rank has noted itself wins.
        """
        frames = [] if self.stack is None else self.stack.frames
        place = telling_frame(frames)
        op = collective_of(frames) or (STORE_BARRIER if self.waits_for_others else None)
        return Spot(self.phase or phase or OUTSIDE, op, None if place is None else str(place))

    def where(self, when: str = "", *, phase: str | None = None) -> str:
        """Returns the end of a sentence that begins with the rank.

        Args:
            when: When it ended or was stopped, if it did, e.g. ``" in phase train"``.
            phase: The phase that others wait in; None if unknown. If the rank's own phase differs, the text names it.
        """
        if self.is_gone:
            if self.exited is not None:
                return f"ended with exit status {self.exited}{when}, without an error and without teardown"
            return f"{self._end()}{when}{self._last_seen()}"
        if self.is_stopped:
            place = None if self.stack is None else self.stack.place
            return f"is stopped{when}" + (self._last_seen() if place is None else f" at {place}")
        notable = f", {self.status}" if self.status == psutil.STATUS_DISK_SLEEP else ""
        notable += f": {self.kernel_wait}" if self.kernel_wait else ""
        if self.status == _UNKNOWN:
            return f"could not be looked at in time{self._last_seen()}"
        if self.stack is None or self.stack.place is None:
            asleep = f": {self.kernel_wait}" if self.kernel_wait else ""
            return f"gives no stack, {self.status}{self._last_seen()}{asleep}"
        if not self.stack.is_in_a_call:
            return f"is in no call{notable}"
        if phase is not None and self.phase not in (None, phase):
            notable = f" {during(self.phase)}{notable}"
        if self.stack.op is None and self.waits_for_others:
            return f"waits for other ranks at {self.stack.place}{notable}"
        awaited = [one.as_awaited for one in self.children[:1] if one.said]
        notable += "".join(f", and {one}" for one in (*awaited, *self.waits, *self.events))
        return f"is {f'in {self.stack.op} ' if self.stack.op else ''}at {self.stack.place}{notable}"

    def _end(self) -> str:
        if self.exit_code is None or (self.never_ends and self.exit_code == -signal.SIGKILL):
            return "died" if self.never_ends else "has no process any more"
        return told_of_exit(self.exit_code)

    def _last_seen(self) -> str:
        return "" if self.last_place is None else f", last seen at {self.last_place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers of a run's ranks on all machines."""

    ranks: Sequence[RankProcess] = ()
    records: Mapping[int, Record] = field(default_factory=dict)
    """Records of the Flight Recorder, by training rank."""
    flights: Mapping[str, bytes] = field(default_factory=dict)
    """The Flight Recorder's files by name, ``flight_<backend>_<rank>``: torch's contents, compressed by zlib."""
    homes: Mapping[RankId, str] = field(default_factory=dict)
    """The node of each rank, by name; empty where all are on this machine."""
    silent: Sequence[str] = ()
    """Nodes that have not answered."""
    more_flights: Sequence[Callable[[], Mapping[str, bytes]]] = ()
    """Each returns the files of another node when called. They come later, because they would delay the answers."""
    reports: Mapping[RankId, RunError] = field(default_factory=dict)
    """Failures that ranks have left by `answering.leave_failure`, and failures of ranks that were stopped and ended."""
    last_places: Mapping[RankId, str] = field(default_factory=dict)
    """The line of code that each rank was last seen at, also for ranks without a process."""

    @classmethod
    def of_nodes(cls, told: Sequence[Answers]) -> Answers:
        """Joins the answers of several nodes, each with ranks of its own."""
        return cls(
            ranks=sorted((rank for one in told for rank in one.ranks), key=lambda rank: rank.rank_id),
            records={rank: record for one in told for rank, record in one.records.items()},
            flights={name: contents for one in told for name, contents in one.flights.items()},
            reports={rank: report for one in told for rank, report in one.reports.items()},
            last_places={rank: place for one in told for rank, place in one.last_places.items()},
        )


def ask_ranks(
    find: Callable[[], Iterable[RankProcess]],
    *,
    patience_s: float,
    folder: Path | None = None,
    call_frame: CallFrame | None = None,
    logs: Path | None = None,
) -> Answers:
    """Asks the processes of ranks on this machine where they are.

    Args:
        find: Returns the processes, e.g. ``lambda: processes_of_run(run_id)``. It gets a share of the time.
        patience_s: Longest wait, in seconds. The result holds all that is known by then.
        folder: The folder in which ranks that have ended may have noted their last places.
        call_frame: Where the host's calls run; None: the main thread counts, as in a script.
        logs: The folder of Ray's logs on this machine, which may tell why a process has ended; None without Ray.
    """
    inquiry = _Inquiry(call_frame, folder, logs)
    # Any look at a process may block, even a read of its environment.
    attempt("asking the ranks", lambda: inquiry.ask(find, 0.9 * patience_s), timeout_s=patience_s)
    flights = dict(inquiry.flights)
    return Answers(
        # Copies, because an abandoned thread may still change the originals.
        ranks=[replace(rank) for rank in inquiry.ranks],
        records=read_flights(flights),
        flights={name: zlib.compress(contents, level=1) for name, contents in flights.items()},
        reports=dict(inquiry.reports),
        last_places=dict(inquiry.last_places),
    )


def processes_of_run(run_id: str, node: str | None = None) -> list[RankProcess]:
    """Finds the ranks of a run on this machine by the marks in their environment. Leaves out their child processes.

    Args:
        run_id: Marks the run's processes.
        node: Keeps only processes that also carry the mark of this node; None keeps all.
    """
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
                    found.append(RankProcess(rank_id=rank_id, pid=process.pid))
    return sorted(found, key=lambda one: one.rank_id)


def ending_here(rank: RankProcess, signs: Signs) -> Ending:
    """Returns why a rank's process has ended, as far as this machine knows.

    Args:
        rank: The process, which has run on this machine.
        signs: From `endings.look_around`.
    """
    if rank.folder is not None and (left := read_exit(rank.folder, rank.rank_id)) is not None:
        return Ending(fault=Fault.EXIT, said=f"it called os._exit at {left[1]}", detail=str(left[0]))
    return ending_of(
        rank.pid,
        signs,
        exit_code=rank.exit_code,
        kills=None if rank.folder is None else rank.folder / kills_file(rank.rank_id),
        noted_s=None if rank.folder is None else last_alive_s(rank.folder, rank.rank_id),
        last_stacks="" if rank.folder is None else read_fatal(rank.folder, rank.rank_id),
    )


class _Inquiry:
    """The facts about the ranks that are known so far; `ask` fills it in.

    Attributes:
        ranks: The ranks that were found, trainers first.
        flights: Contents of Flight Recorder files, by name.
        reports: See `Answers.reports`.
        last_places: See `Answers.last_places`.
    """

    def __init__(self, call_frame: CallFrame | None, folder: Path | None, logs: Path | None) -> None:
        self._call_frame, self._folder, self._logs = call_frame, folder, logs
        self._processes: dict[int, psutil.Process] = {}
        self.ranks: list[RankProcess] = []
        self.flights: dict[str, bytes] = {}
        self.reports: dict[RankId, RunError] = {}
        self.last_places: dict[RankId, str] = {}

    def ask(self, find: Callable[[], Iterable[RankProcess]], patience_s: float) -> None:
        """Collects the answers. Waits for half of the time; the rest is for a look at processes that do not answer."""
        deadline = Deadline.after(patience_s)
        self.ranks = list(find())
        for rank in self.ranks:
            self._look_at(rank)
        before = self._sizes_of_stacks()
        asked_in = {rank.folder for rank in self.ranks if rank.folder is not None}
        known = asked_in | ({self._folder} if self._folder is not None else set())
        self._read_last_places(known)
        self._have_ranks_answer(asked_in, before, deadline)
        self._read_flights(asked_in)
        for rank in self.ranks:
            if not rank.is_gone:
                self._read_stack(rank, max(0, before.get(rank.rank_id, 0)), deadline)
        for rank in self.ranks:
            self._look_at_wait(rank, deadline)
        # Read late: ranks that wait for each other give up at about the same time. The host hears only of the first.
        self._read_reports(known)
        self._look_into_endings()
        for rank in self.ranks:
            if rank.status == psutil.STATUS_DISK_SLEEP:
                # Bounded, because a read of some files in /proc blocks until the process wakes up.
                look = partial(self._look_into_kernel, rank)
                attempt(f"looking at process {rank.pid}", look, timeout_s=_KERNEL_LOOK_S)

    def _sizes_of_stacks(self) -> dict[RankId, int]:
        """Finds the folder of each living rank. Returns the size in bytes of its file of stacks; -1 without a file."""
        sizes: dict[RankId, int] = {}
        for rank in self.ranks:
            with suppress(psutil.Error, OSError):
                if not rank.is_gone:
                    rank.folder = rank.folder or env.hang_dir(self._processes[rank.pid].environ())
                if not rank.is_gone and rank.folder is not None:
                    sizes[rank.rank_id] = _size(rank.folder / stack_file(rank.rank_id))
        return sizes

    def _have_ranks_answer(self, folders: Iterable[Path], before: Mapping[RankId, int], deadline: Deadline) -> None:
        """Asks every rank that listens, first through its pipes, then by a signal. Waits until their files are written.

        Args:
            folders: The folders with the ranks' pipes.
            before: The result of `_sizes_of_stacks`, which has the living ranks.
            deadline: End of the whole inquiry.
        """
        stopped = {rank.rank_id for rank in self.ranks if rank.is_stopped}
        asked: dict[Path, RankProcess] = {}
        awaited: dict[Path, _Version] = {}
        for folder in folders:
            old = {file: _version(file) for file in folder.glob("*")}
            # Ranks that have reported their failure are asked, too: their records show their collectives.
            here = _request_all(folder) - stopped
            nccl = _request_nccl_flights(folder) - stopped
            stacks = {
                folder / stack_file(rank.rank_id): rank
                for rank in self.ranks
                if rank.folder == folder and rank.rank_id in here & before.keys()
            }
            files = [folder / f"{env.NCCL_FLIGHTS}{one.rank}" for one in nccl]
            files += [folder / f"{GLOO_FLIGHTS}{one.rank}" for one in here if one.role is Role.TRAINER]
            awaited |= {file: old.get(file) for file in (*files, *stacks)}
            asked |= stacks
        _settle(awaited, deadline.share(0.3))
        silent = {file: version for file, version in awaited.items() if file in asked and _version(file) == version}
        for file in silent:
            with suppress(OSError):
                if _listens(asked[file].pid):
                    os.kill(asked[file].pid, STACK_SIGNAL)
        _settle(silent, deadline.share(0.3))

    def _read_flights(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            for file in (file for prefix in (GLOO_FLIGHTS, env.NCCL_FLIGHTS) for file in folder.glob(f"{prefix}*")):
                with suppress(OSError):
                    contents = read_foreign(file, limit_bytes=_FLIGHT_BYTES, within=folder, uid=os.getuid())
                    self.flights |= {file.name: contents} if contents else {}

    def _look_at_wait(self, rank: RankProcess, deadline: Deadline) -> None:
        """Finds out if a rank waits for something other than a rank: a child process, or the operating system."""
        stack = None if rank.is_gone or rank.is_stopped else rank.stack
        if stack is None or stack.waits_for_others:
            return
        if waits_for_a_child(stack.frames):
            rank.children = children_of(rank.pid, deadline, ask=partial(self._ask_child, rank, deadline))
        if stack.is_in_a_call:
            look = partial(self._look_at_threads, rank, stack)
            attempt(f"looking at the threads of process {rank.pid}", look, timeout_s=_KERNEL_LOOK_S)

    def _read_reports(self, folders: Iterable[Path]) -> None:
        """Reads the failures that ranks have left, and the records of stopped processes that a watch has ended."""
        for rank in self.ranks:
            if rank.folder is not None and (report := read_failure(rank.folder, rank.rank_id)) is not None:
                self.reports[rank.rank_id] = report
        ids_by_pid = {rank.pid: rank.rank_id for rank in self.ranks}
        pids = {rank.rank_id: rank.pid for rank in reversed(self.ranks)}
        for stop in (stop for folder in sorted(folders) for stop in read_stops(folder)):
            rank_id = stop.rank_of(ids_by_pid)
            if rank_id is not None and stop.may_explain(unix_now()):
                self.reports.setdefault(rank_id, stop.failure(rank_id, pids.get(rank_id)))

    def _ask_child(self, rank: RankProcess, deadline: Deadline, pid: int) -> str:
        """Returns the stacks of a forked child, which writes to the rank's own file; empty for any other child."""
        if rank.folder is None or not _listens(pid) or _size(file := rank.folder / stack_file(rank.rank_id)) < 0:
            return ""
        before, version = _size(file), _version(file)
        os.kill(pid, STACK_SIGNAL)
        _settle({file: version}, deadline.share(0.2))
        written = read_foreign(file, limit_bytes=_STACK_BYTES, uid=os.getuid())
        return written[before:].decode("utf-8", errors="replace")

    def _look_into_endings(self) -> None:
        gone = [rank for rank in self.ranks if rank.is_gone and rank.exit_code != 0]
        if not gone:
            return
        signs = look_around(self._logs)
        for rank in gone:
            self._poll(rank)  # it may have ended after the first look
            folder = rank.folder or self._folder
            rank.ending = ending_here(replace(rank, folder=folder), signs)
            left = None if folder is None else read_exit(folder, rank.rank_id)
            rank.exited = None if left is None else left[0]
            if folder is not None and (text := read_fatal(folder, rank.rank_id)):
                rank.text, rank.source = text, "rank"
                rank.last_place = rank.ending.place or rank.last_place  # these stacks are newer than the last note

    def _look_at_threads(self, rank: RankProcess, stack: Stack) -> None:
        rank.waits = wait_of_thread(stack, rank.pid)

    def _look_into_kernel(self, rank: RankProcess) -> None:
        if (facts := look_at(rank.pid)).state in DISK_SLEEP:
            rank.kernel_wait = facts.describe_wait()

    def _look_at(self, rank: RankProcess) -> None:
        """Asks the system about a process, and the host for its exit code. Opens no file of the run."""
        try:
            process = self._processes[rank.pid] = psutil.Process(rank.pid)
            rank.status, rank.cpu_s = process.status(), sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            rank.status = _GONE
        except psutil.Error:
            rank.status = _UNKNOWN
        self._poll(rank)

    def _poll(self, rank: RankProcess) -> None:
        if rank.poll is not None and rank.exit_code is None:
            rank.exit_code = rank.poll()

    def _read_last_places(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            for file in folder.glob("place_*.txt"):
                rank_id = rank_of_place(file.name)
                if rank_id is not None and (place := read_place(folder, rank_id)) is not None:
                    self.last_places[rank_id] = place
        for rank in self.ranks:
            rank.last_place = self.last_places.get(rank.rank_id)
            notes = rank.folder or self._folder
            rank.phase = None if notes is None else read_phase(notes, rank.rank_id)

    def _read_stack(self, rank: RankProcess, offset: int, deadline: Deadline) -> None:
        with suppress(psutil.Error, OSError):
            file = None if rank.folder is None else rank.folder / stack_file(rank.rank_id)
            # The text before this offset answers an earlier request.
            written = read_foreign(file, limit_bytes=_STACK_BYTES, uid=os.getuid())[offset:] if file else b""
            rank.text, rank.source = written.decode("utf-8", errors="replace"), "rank"
        if not rank.text or is_cut_off(rank.text):
            rank.text, rank.source = py_spy(rank.pid, timeout_s=deadline.remaining().total_seconds()), "py-spy"
        if not rank.text:
            rank.source = None
            self._look_at(rank)  # again: it may have stopped or ended since it was asked
            return
        rank.stack = Stack.parse(rank.text, rank.call_frame or self._call_frame)
        rank.events = events_of(rank.text)


def _listens(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1)


def _request(pipe: Path) -> bool:
    """Writes to a pipe of a rank; returns False if nobody reads it."""
    with suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        try:
            return os.write(descriptor, b"1") == 1
        finally:
            os.close(descriptor)
    return False


def _request_all(folder: Path) -> set[RankId]:
    """Asks each rank that listens for its stacks and for its record of gloo's groups; returns these ranks."""
    pipes = ((rank_of_pipe(pipe.name), pipe) for pipe in folder.glob("*.pipe"))
    return {rank_id for rank_id, pipe in pipes if rank_id is not None and _request(pipe)}


def _request_nccl_flights(folder: Path) -> set[RankId]:
    """Asks torch in each trainer for its record of NCCL's groups; returns the trainers that listen.

    Does not remove the answer to an earlier request, because torch writes into the file that it has open.
    """
    found = set()
    for pipe in folder.glob(f"{env.NCCL_REQUESTS}*.pipe"):
        with suppress(ValueError):  # a name that is not ours
            if _request(pipe):
                found.add(trainer_id(int(pipe.stem.removeprefix(env.NCCL_REQUESTS))))
    return found


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return -1


def _version(file: Path) -> _Version:
    """Returns a file's inode, time of change in ns and size in bytes; None without a file.

    The size alone is not enough: a new record of the Flight Recorder may have the size of the record that it replaces.
    """
    with suppress(OSError):
        found = file.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None


def _settle(awaited: Mapping[Path, _Version], deadline: Deadline) -> None:
    """Waits until each file differs from its version before the request, and none has changed since the last look."""
    last: list[_Version] = []
    while not deadline.expired:
        time.sleep(_LOOK_S)
        now = [_version(file) for file in awaited]
        if now == last and all(version != before for version, before in zip(now, awaited.values(), strict=True)):
            return
        last = now
