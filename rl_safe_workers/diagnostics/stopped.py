"""Notices processes that are stopped (SIGSTOP), and ends those that stay stopped.

A stopped process lives but answers nobody. Without this watch, a run would wait for it until the deadline of its phase.
Once the process has ended, the run notices that as it notices any other death. A record keeps the reason:

    stopped_<pid>.json    in the folder where ranks leave their answers

A process stopped by a debugger has another state in the kernel (``t``), and does not count. Nothing here needs torch or
Ray.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import psutil

from rl_safe_workers import env
from rl_safe_workers.diagnostics.answering import open_anew, start_thread
from rl_safe_workers.diagnostics.proc_facts import GONE, NO_PROCESS, STOPPED_BY_SIGNAL
from rl_safe_workers.diagnostics.rank_files import ranks_by_process, read_place
from rl_safe_workers.errors import RankError, Stopped
from rl_safe_workers.foreign_files import read_foreign
from rl_safe_workers.lifecycle import unix_now
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.reaping.processes import make_private, stat_of

logger = logging.getLogger(__name__)

Key = TypeVar("Key")

LOOK_EVERY_S = 1.0
"""Seconds between two looks at the processes of a machine."""
LOOK_SHARE = 0.004
"""Largest share of one core for the looks. On a machine with very many processes the pause grows to keep to it."""
_LATE_S = 2.0
"""If a watch looks so much later than planned, it was stopped itself: Ctrl-Z or a scheduler stops a whole job."""
_ENDING_S = 5.0
_FELT_S = 60.0
"""Seconds after the end of a process within which the failure of a rank may be a consequence."""
_MOST_PARENTS = 16
_RECORD_BYTES = 2**16


class Changes(NamedTuple, Generic[Key]):
    """The changes that one look has found.

    Example: ``Changes(begun=[], over=[(4711, 1.5)], expired=[])``
    """

    begun: list[Key]
    """Found stopped for the first time."""
    over: list[tuple[Key, float]]
    """Not stopped any more, each with the seconds for which it was seen stopped."""
    expired: list[tuple[Key, float]]
    """Stopped for longer than the limit, each with its seconds. A process is listed only once."""


class StopTimes(Generic[Key]):
    """Counts the seconds for which processes are seen stopped. Pure: the caller gives the time and the processes."""

    def __init__(self, limit_s: float) -> None:
        """Has seen nothing yet.

        Args:
            limit_s: Seconds after which a stop has lasted too long.
        """
        self._limit_s = limit_s
        self._since_s: dict[Key, float] = {}
        self._expired: set[Key] = set()

    def look(self, stopped: Collection[Key], now_s: float, *, is_late: bool = False) -> Changes[Key]:
        """Adds the result of one look, and returns the changes since the look before.

        Args:
            stopped: The processes that are stopped now.
            now_s: Seconds on a monotonic clock.
            is_late: True if this look is later than planned. All counts then start again from 0.
        """
        over = [(one, now_s - since_s) for one, since_s in self._since_s.items() if one not in stopped]
        begun = [one for one in stopped if one not in self._since_s]
        known = {one: now_s if is_late else self._since_s.get(one, now_s) for one in stopped}
        expired = [
            (one, now_s - since_s)
            for one, since_s in known.items()
            if one not in self._expired and now_s - since_s >= self._limit_s
        ]
        self._expired = {one for one in self._expired if one in known} | {one for one, _ in expired}
        self._since_s = known
        return Changes(begun=begun, over=over, expired=expired)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoppedProcess:
    """A process that is stopped.

    Example: ``StoppedProcess(pids=(4711, 17), started=98765, rank_id=trainer_id(1), is_rank=True, name="python")``
    """

    pids: tuple[int, ...]
    """Its own id, then the ids of its ancestors."""
    started: int
    """Clock ticks from the machine's boot to its start. Together with the id, it identifies the process."""
    rank_id: RankId | None
    """The rank that it is or works for; None if only its ancestors may tell."""
    is_rank: bool
    """True if it is the rank itself."""
    name: str

    def __eq__(self, other: object) -> bool:
        # Its ancestors may end, and its rank may become known, while it is stopped.
        return isinstance(other, StoppedProcess) and (self.pid, self.started) == (other.pid, other.started)

    def __hash__(self) -> int:
        return hash((self.pid, self.started))

    @property
    def pid(self) -> int:
        """Its own id."""
        return self.pids[0]

    @property
    def who(self) -> str:
        """Names it in a sentence."""
        if self.is_rank:
            return f"{self.rank_id} (process {self.pid})"
        return f"process {self.pid} ({self.name}){'' if self.rank_id is None else f' of {self.rank_id}'}"

    def state(self) -> str | None:
        """Returns the kernel's letter for its state now; None if it has ended."""
        stat = stat_of(self.pid)
        return None if stat is None or stat.started != self.started else stat.state

    def end(self) -> bool:
        """Kills the process if it is still stopped. Returns False if it was continued, or has ended, since."""
        if self.state() != STOPPED_BY_SIGNAL:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The record of a stop that has lasted too long."""

    process: StoppedProcess
    place: str | None
    """The line of code that its rank noted last; None if unknown."""
    at_s: float
    """Unix time in seconds when it was found."""
    lasted_s: float = 0.0
    """Seconds from then until the process was ended."""

    def may_explain(self, now_s: float) -> bool:
        """Returns True if this stop may have caused a failure.

        The stop of a rank itself always may. The stop of another process may for some seconds after its end.

        Args:
            now_s: Unix time in seconds when the failure was seen.
        """
        return self.process.is_rank or now_s - (self.at_s + self.lasted_s) < _FELT_S

    def rank_of(self, ranks: Mapping[int, RankId]) -> RankId | None:
        """Returns the rank that was stopped, or that the stopped process worked for; None if unknown.

        Args:
            ranks: The ranks that the host knows, by process id.
        """
        known = [ranks[pid] for pid in self.process.pids if pid in ranks]
        return self.process.rank_id if not known else known[0]

    def failure(self, rank_id: RankId, pid: int | None = None) -> RankError:
        """Returns the stop as the failure of a rank.

        Args:
            rank_id: The rank, see `rank_of`.
            pid: The rank's process, if the host knows it.
        """
        own = self.process.is_rank or self.process.pid == pid
        return RankError(
            rank_id=rank_id,
            phase="unknown",
            cause=Stopped(),
            text="is stopped" if own else f"has a process that is stopped, {self.process.pid} ({self.process.name})",
            trace="",
            raised_at=self.at_s,
            place=self.place,
        )

    def to_text(self) -> str:
        """Returns text for `from_text`."""
        process = self.process
        rank = None if process.rank_id is None else list(process.rank_id)
        fields = {"pids": process.pids, "started": process.started, "rank": rank, "is_rank": process.is_rank}
        return json.dumps(
            {**fields, "name": process.name, "place": self.place, "at_s": self.at_s, "lasted_s": self.lasted_s}
        )

    @classmethod
    def from_text(cls, text: bytes) -> Stop:
        """Reads the text of `to_text`.

        Raises:
            ValueError: If it is something else.
        """
        try:
            fields = json.loads(text)
            role, rank = fields["rank"] or (None, 0)
            process = StoppedProcess(
                pids=tuple(map(int, fields["pids"])),
                started=int(fields["started"]),
                rank_id=None if role is None else RankId(Role(role), int(rank)),
                is_rank=bool(fields["is_rank"]),
                name=str(fields["name"]),
            )
            place = fields["place"]
            return cls(
                process=process,
                place=None if place is None else str(place),
                at_s=float(fields["at_s"]),
                lasted_s=float(fields["lasted_s"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no record of a stop: {error}") from error


def read_stops(folder: Path) -> list[Stop]:
    """Returns the stops that have lasted too long, the earliest first.

    Args:
        folder: Where ranks leave their answers.
    """
    found = []
    for file in folder.glob("stopped_*.json"):
        try:
            text = read_foreign(file, limit_bytes=_RECORD_BYTES, within=folder, uid=os.getuid())
            found.append(Stop.from_text(text))
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read: %s", file, error)
    return sorted(found, key=lambda stop: stop.at_s)


def forget_stops(folder: Path, rank_id: RankId) -> None:
    """Removes the records of a rank's stops, before another process takes its place.

    Args:
        folder: Where ranks leave their answers.
        rank_id: The rank.
    """
    for stop in read_stops(folder):
        if stop.process.rank_id == rank_id:
            _record_of(folder, stop.process).unlink(missing_ok=True)


def _record_of(folder: Path, process: StoppedProcess) -> Path:
    return folder / f"stopped_{process.pid}.json"


class StoppedProcessWatch:
    """Looks at processes, reports the stopped ones, and ends those that stay stopped."""

    def __init__(
        self,
        folder: Path,
        limit_s: float,
        find: Callable[[], Iterable[StoppedProcess]],
        *,
        before_end: Callable[[Stop], object] = lambda stop: None,
        spared: Callable[[], object] = lambda: None,
    ) -> None:
        """Looks at nothing yet.

        Args:
            folder: Where ranks leave their answers. Gets the records.
            limit_s: Seconds after which a stopped process is ended.
            find: Returns the processes that are stopped now.
            before_end: Called with the record of a process that is about to be ended.
            spared: Called if that process was continued in the meantime.
        """
        self._spared = spared
        self._folder, self._limit_s, self._find, self._before_end = folder, limit_s, find, before_end
        self._times: StopTimes[StoppedProcess] = StopTimes(limit_s)
        self._due_s: float | None = None
        self._has_failed = False

    def look(self) -> float:
        """Looks once. Returns the seconds to pause before the next look."""
        began_s = time.thread_time()
        stopped = list(self._find())
        pause_s = max(LOOK_EVERY_S, (time.thread_time() - began_s) / LOOK_SHARE)
        now_s = time.monotonic()
        is_late = self._due_s is not None and now_s > self._due_s + _LATE_S
        news = self._times.look(stopped, now_s, is_late=is_late)
        for one in news.begun:
            at = self._place(one)
            logger.warning(
                "%s is stopped (SIGSTOP)%s: it is killed if it stays stopped for %.0f s; to resume it: kill -CONT %d",
                *(one.who, "" if at is None else f", last seen at {at}", self._limit_s, one.pid),
            )
        for one, seen_s in news.over:
            if (one.state() or NO_PROCESS) not in GONE:
                logger.warning("%s was resumed after %.0f s", one.who, seen_s)
        for one, seen_s in news.expired:
            self._end(one, seen_s)
        self._due_s = time.monotonic() + pause_s
        return pause_s

    def look_or_tell(self) -> float:
        """Does the same as `look`, but logs an error instead of raising it. Logs a repeated error only once."""
        try:
            pause_s = self.look()
        except Exception:
            if not self._has_failed:
                logger.exception("the watch for stopped processes failed; it tries again")
            self._has_failed = True
            return LOOK_EVERY_S
        self._has_failed = False
        return pause_s

    def _place(self, one: StoppedProcess) -> str | None:
        return None if one.rank_id is None else read_place(self._folder, one.rank_id)

    def _end(self, one: StoppedProcess, seen_s: float) -> None:
        if one.state() != STOPPED_BY_SIGNAL:  # the next look reports it
            return
        stop = Stop(process=one, place=self._place(one), at_s=unix_now() - seen_s, lasted_s=seen_s)
        file = _record_of(self._folder, one)
        try:
            make_private(self._folder)
            with os.fdopen(open_anew(file), "w", encoding="utf-8") as record:
                record.write(stop.to_text())
        except OSError as lost:  # end the process even without the record, or the run would wait for it
            logger.warning("the record of a stop cannot be left in %s: %s", self._folder, lost)
        logger.error("%s was stopped (SIGSTOP) for %.0f s: it is ended, because the run waits for it", one.who, seen_s)
        self._before_end(stop)
        if not one.end():
            file.unlink(missing_ok=True)
            self._spared()


class MachineWatch:
    """A thread that watches the processes of a run on this machine."""

    def __init__(self, run_id: str, folder: Path, limit_s: float, *, node: str | None = None) -> None:
        """Starts the thread.

        Args:
            run_id: Marks the processes.
            folder: Where the ranks leave their answers; need not exist yet.
            limit_s: Seconds after which a stopped process is ended; 0: none is watched.
            node: Watches only processes that also carry the mark of this node; None: all of the run.
        """
        self._ends = threading.Event()
        self._watch = StoppedProcessWatch(folder, limit_s, partial(stopped_processes, run_id, folder, node))
        self._thread = start_thread("stop-watch", self._run) if limit_s > 0 else None

    def _run(self) -> None:
        while not self._ends.wait(self._watch.look_or_tell()):
            pass

    def close(self) -> None:
        """Ends the thread. Idempotent. Waits some seconds at most for a look in progress."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(_ENDING_S)


def stopped_processes(run_id: str, folder: Path, node: str | None = None) -> list[StoppedProcess]:
    """Returns the stopped processes of a run on this machine, except this process.

    Args:
        run_id: Marks the run's processes.
        folder: Where the ranks have noted who they are.
        node: Keeps only processes that also carry the mark of this node; None keeps all.
    """
    found = []
    for pid in _pids():
        with suppress(psutil.Error, PermissionError):  # it has ended, or is another user's
            stat = stat_of(pid)
            if stat is None or stat.state != STOPPED_BY_SIGNAL or pid == os.getpid():
                continue
            process = psutil.Process(pid)
            environ = process.environ()
            if process.uids().effective != os.geteuid() or not env.belongs_to_run(environ, run_id, node):
                continue
            rank_id = ranks_by_process(folder).get(pid)
            found.append(
                StoppedProcess(
                    pids=(pid, *_parents_of(pid)),
                    started=stat.started,
                    rank_id=rank_id or env.actor_of(environ),
                    is_rank=rank_id is not None,
                    name=process.name(),
                )
            )
    return found


def stopped_process(pid: int, rank_id: RankId) -> StoppedProcess | None:
    """Returns the process of a rank if it is stopped, else None."""
    stat = stat_of(pid)
    if stat is None or stat.state != STOPPED_BY_SIGNAL:
        return None
    return StoppedProcess(pids=(pid,), started=stat.started, rank_id=rank_id, is_rank=True, name=str(rank_id))


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208 - half the cost of a Path


def _parents_of(pid: int) -> Iterator[int]:
    for _ in range(_MOST_PARENTS):
        stat = stat_of(pid)
        if stat is None or stat.parent <= 1:
            return
        pid = stat.parent
        yield pid
