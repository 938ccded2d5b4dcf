"""Explains a dead run of any host from its files: our evidence, Flight Recorder files, Ray's session folder, logs.

No file is trusted. Files are read up to a limit of size, and lines up to a limit of length. A bounded child reads
pickles as data.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from rl_safe_workers.diagnostics.explanation import Explanation, Row, Slice
from rl_safe_workers.diagnostics.flight_files import FLIGHT_ADVICE, Flight, Lag, lagging, read_flight_file
from rl_safe_workers.diagnostics.log_lines import (
    ADVICE,
    Fault,
    exception_line,
    fault_of_exception,
    fault_of_line,
    frame_line,
    is_report,
    pids_in_name,
    stripped,
    time_of,
)
from rl_safe_workers.diagnostics.verdict_file import VERDICT_FILE, KeptVerdict, read_verdict
from rl_safe_workers.errors import RlSafeError, UsageError
from rl_safe_workers.findings import counted
from rl_safe_workers.foreign_files import entries_below, kind_of, open_foreign, printable
from rl_safe_workers.frames import Frame, relative, telling_frame

_MOST_FILES, _MOST_FLIGHTS = 20_000, 512
_HEAD_BYTES, _TAIL_BYTES = 2**20, 8 * 2**20
"""Read of the beginning and of the end of a log."""
_TOTAL_BYTES = 2**30
_LINE_CHARACTERS, _QUOTED_CHARACTERS = 4000, 300
_STILL_ALIVE = 20
"""A process that writes more lines than this after a traceback has not died of it."""
_LOGS = re.compile(r".*(\.(log|err|out|txt|stderr|stdout)|\.log\.\d+|slurm-\S+|std(out|err)|dmesg\S*|nohup\S*)")
_FLIGHTS = re.compile(
    r"(flight_(gloo|nccl)_|nccl_trace_rank_|\w*flight\w*_|\w*trace_rank_?)(\d{1,6})(\.(pkl|pickle|json))?"
)
_OF_RAY = re.compile(r"(dashboard|monitor|log_monitor|runtime_env|gcs_server|raylet|python-core|debug_state|agent)\S*")
"""Files of Ray's own services: their tracebacks are not the run's."""
_RANK_OF_FILE = re.compile(r"(?:^|[^a-z])(?:rank|trainer|rollout)[_\-.]?(\d{1,6})(?:\D|$)")
_RANK_OF_FOLDER = re.compile(r"attempt_\d+/(\d{1,6})/std(?:out|err)\.log$")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_TRACEBACK = "Traceback (most recent call last):"
_SHOWN, _SAID_CHARACTERS = 40, 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A failure that a file tells of.

    Example: ``Event(fault=Fault.IMPORT, who="rank 1", text="ImportError: no", source="a.log:12", at_s=1.0)``
    """

    fault: Fault
    who: str
    text: str
    """The line, as it is in the file."""
    source: str
    at_s: float
    """Unix time in seconds; the time of the file's last change if no line has a time."""
    is_timed: bool = False
    """True if ``at_s`` comes from a line."""
    is_weak: bool = False
    """True if the process lived on, or is not known to belong to the run."""
    place: str = ""
    pid: int | None = None
    detail: str = ""
    """A signal or a code."""

    @property
    def title(self) -> str:
        """Returns the kind with its signal or code."""
        return f"{self.fault} {self.detail}".strip()

    @property
    def order(self) -> tuple[int, float]:
        """The sort key: causes before their consequences, then by time; weak events after all possible causes."""
        return max(self.fault.tier, 2 * self.is_weak), self.at_s


@dataclass(slots=True)
class _Found:
    events: list[Event] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    unread_flights: list[int] = field(default_factory=list)
    """The rank of each Flight Recorder file beyond the limit."""
    verdicts: list[tuple[str, KeptVerdict]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    logs: int = 0
    pids: dict[str, int] = field(default_factory=dict)
    """Process ids of Ray's workers, by Ray's id of the worker."""
    read_bytes: int = 0


def explain_folder(folder: Path) -> Explanation:
    """Returns the reason why a run has died, from the files that it has left in a folder. Writes nothing.

    Raises:
        UsageError: If there is no such folder, or it cannot be read.
    """
    if kind_of(folder) != "folder":
        raise UsageError(f"{folder} is not a folder: give the one with the logs of the run")
    found = _Found()
    try:
        for path in _files(folder, found):
            _read(path, folder, found)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({error.strerror}): check it") from error
    _join(found)
    return _explain(found)


def _files(folder: Path, found: _Found) -> Iterator[Path]:
    paths = []
    for number, entry in enumerate(entries_below(folder)):
        if number >= _MOST_FILES:
            found.notes.append(f"not read: more than {_MOST_FILES} files; give a folder below")
            break
        if entry.is_file(follow_symlinks=False):
            paths.append(Path(entry.path))
    yield from sorted(paths)


def _read(path: Path, folder: Path, found: _Found) -> None:
    name, source = path.name, str(path.relative_to(folder))
    for pid in pids_in_name(name):
        found.pids[name.split("-")[1]] = pid
    try:
        if name == VERDICT_FILE:
            found.verdicts.append((source, read_verdict(path, within=folder)))
        elif (flight := _FLIGHTS.fullmatch(name)) is not None:
            if len(found.flights) < _MOST_FLIGHTS:
                found.flights.append(read_flight_file(path, global_rank=int(flight[3])))
            else:
                found.unread_flights.append(int(flight[3]))
        elif _LOGS.fullmatch(name) and not name.startswith(("stack_", "place_")):
            _read_log(path, source, found)
    except (OSError, ValueError) as error:
        found.notes.append(f"not read: {source} ({getattr(error, 'strerror', None) or error})")
    except RlSafeError as error:
        found.notes.append(f"not read: {error}")


def _read_log(path: Path, source: str, found: _Found) -> None:
    if found.read_bytes > _TOTAL_BYTES:
        found.notes.append(f"not read: {source} (1 GiB of logs was read before)")
        return
    found.events += events_of_log(path, source, found)


def events_of_log(path: Path, source: str, found: _Found | None = None) -> list[Event]:
    """Returns the failures in one log, in the order of its lines.

    Args:
        path: The log. Only the beginning and the end of a long log are read.
        source: The log's name, for the events.
        found: Gets the number of bytes read; None: they are not counted.

    Raises:
        OSError: If it cannot be read.
    """
    with open_foreign(path) as file:
        status = os.fstat(file.fileno())
        blocks = list(_blocks(file, status.st_size))
    if found is not None:
        found.read_bytes += sum(len(block) for _, block in blocks)
        found.logs += 1
    if any(b"\0" in block[:4096] for _, block in blocks):
        return []  # no text
    who = _who_of(source)
    reader = _LogReader(
        source=source, who=who, changed_s=status.st_mtime, of_ray=_OF_RAY.fullmatch(path.name) is not None
    )
    for start, block in blocks:
        lines = block.decode("utf-8", errors="replace").splitlines()
        reader.read(lines, "" if start == 0 else "~")
    return reader.finish()


def _blocks(file: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    """Yields the beginning and the end of a file, with their offsets. Yields a short file as a whole."""
    if size <= _HEAD_BYTES + _TAIL_BYTES:
        yield 0, file.read(_HEAD_BYTES + _TAIL_BYTES)
        return
    yield 0, file.read(_HEAD_BYTES)
    file.seek(size - _TAIL_BYTES)
    yield size - _TAIL_BYTES, file.read(_TAIL_BYTES)


def _who_of(source: str) -> str:
    if (found := _RANK_OF_FOLDER.search(source) or _RANK_OF_FILE.search(source.rpartition("/")[2].lower())) is not None:
        return f"rank {int(found[1])}"
    pids = [f"process {pid}" for pid in pids_in_name(source.rpartition("/")[2])]
    return pids[0] if pids else ""


@dataclass(slots=True)
class _Traceback:
    """A traceback that is being read."""

    who: str
    is_chained: bool
    frames: list[Frame] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _LogReader:
    """Reads the lines of one log. Each process that a prefix names has a stream of its own."""

    source: str
    who: str
    changed_s: float
    of_ray: bool
    _events: list[tuple[Event, str, int]] = field(default_factory=list)
    """With the stream, and the number of ordinary lines in it before."""
    _ordinary: dict[str, int] = field(default_factory=dict)
    _open: dict[str, _Traceback] = field(default_factory=dict)
    _chains: set[str] = field(default_factory=set)
    _now_s: float | None = None
    _rank: str = ""

    def read(self, lines: Sequence[str], mark: str) -> None:
        """Reads lines. ``mark`` is put before their numbers if those are not known."""
        year = time.localtime(self.changed_s).tm_year
        for number, raw in enumerate(lines, start=1):
            line = stripped(raw[:_LINE_CHARACTERS])
            at_s = time_of(line.text, year)
            if at_s is not None or not is_report(line.text):
                self._now_s = at_s
            self._read_line(line.text.rstrip(), line.who, f"{self.source}:{mark}{number}")

    def finish(self) -> list[Event]:
        """Returns the events. An event is weak if its process went on after it."""
        return [
            replace(event, is_weak=True) if self._ordinary.get(stream, 0) - before > _STILL_ALIVE else event
            for event, stream, before in self._events
        ]

    def _read_line(self, text: str, stream: str, source: str) -> None:
        if text.lstrip("| +-").startswith(_TRACEBACK):
            if not self.of_ray:
                self._open[stream] = _Traceback(stream or self.who, stream in self._chains)
            self._chains.discard(stream)
        elif stream in self._open:
            self._read_traceback(text, stream, source)
        elif text.startswith(_CHAINED):
            self._chains.add(stream)
        elif (found := fault_of_line(text)) is not None:
            rank = f"rank {found.rank}" if found.rank is not None else self._rank
            pid = None if found.pid is None else f"process {found.pid}"
            who = " ".join(filter(None, (rank, f"({pid})" if rank and pid else pid))) or stream or self.who
            event = self._event(found.fault, who, text, source, pid=found.pid, detail=found.detail)
            if found.unix_s is not None:
                event = replace(event, at_s=found.unix_s, is_timed=True)
            if found.worker:
                event = replace(event, who=f"worker {found.worker}")
            self._add(event, stream)
        else:
            if (rank_line := re.match(r"^\s*rank\s+: (\d{1,6}) \(local_rank", text)) is not None:
                self._rank = f"rank {rank_line[1]}"
            if text and not is_report(text):
                self._rank = ""
                self._ordinary[stream] = self._ordinary.get(stream, 0) + 1
                if stream in self._chains and self._ordinary[stream]:
                    self._chains.discard(stream)

    def _read_traceback(self, text: str, stream: str, source: str) -> None:
        traceback = self._open[stream]
        if (frame := frame_line(text)) is not None:
            traceback.frames.append(Frame(file=relative(frame[0]), line=frame[1], function=frame[2]))
        elif text and not text.startswith((" ", "\t", "|", "+")):
            kind = exception_line(text)
            if kind is not None and kind.startswith("ray.exceptions.RayTaskError"):
                # The frames of the task and its own exception follow.
                task = re.search(r"(ray::[\w.]+).*\(pid=(\d+)", text)
                who = traceback.who if task is None else f"{task[1]} (process {task[2]})"
                self._open[stream] = _Traceback(who, traceback.is_chained)
                return
            del self._open[stream]
            if kind is None or traceback.is_chained:
                return  # it is cut off, or it is a consequence of the exception before
            place = telling_frame(reversed(traceback.frames))
            event = self._event(fault_of_exception(text), traceback.who, text, source)
            self._add(replace(event, place="" if place is None else str(place)), stream)

    def _event(
        self, fault: Fault, who: str, text: str, source: str, *, pid: int | None = None, detail: str = ""
    ) -> Event:
        return Event(
            fault=fault,
            who=who,
            text=printable(text.strip())[:_QUOTED_CHARACTERS],
            source=source,
            # An earlier line may be hours older. A process writes its last lines when it dies.
            at_s=self.changed_s if self._now_s is None else self._now_s,
            is_timed=self._now_s is not None,
            pid=pid,
            detail=detail,
        )

    def _add(self, event: Event, stream: str) -> None:
        self._events.append((event, stream, self._ordinary.get(stream, 0)))


def _join(found: _Found) -> None:
    """Gives Ray's workers their process ids, and marks OOM kills of processes outside the run as weak."""
    events = [
        replace(event, who=f"process {pid}", pid=pid)
        if event.who.startswith("worker ") and (pid := found.pids.get(event.who.removeprefix("worker "))) is not None
        else event
        for event in found.events
    ]
    known = {event.pid for event in events if event.fault is not Fault.OOM_KILL} | set(found.pids.values())
    events = [
        replace(event, is_weak=True)
        if event.fault is Fault.OOM_KILL and event.pid is not None and event.pid not in known
        else event
        for event in events
    ]
    # Ray tells the driver which worker died in a task. Ray's own logs also report every worker that ended later.
    told = {_pid_of(event) for event in events if event.fault is Fault.SILENT_END and not _is_of_ray(event)} - {None}
    events = [
        replace(event, is_weak=True)
        if event.fault is Fault.SILENT_END and told and _is_of_ray(event) and _pid_of(event) not in told
        else event
        for event in events
    ]
    # A kill in the kernel's log, or a signal, tells more than another process's report that this one has ended.
    killed = {event.pid for event in events if event.fault is Fault.OOM_KILL and not event.is_weak} - {None}
    signalled = {_pid_of(event) for event in events if event.fault is Fault.SIGNAL} - {None}
    raised = {_rank_of(event) for event in events if event.place} - {None}
    found.events = [
        event
        for event in events
        if not (event.fault in (Fault.SIGNAL, Fault.SILENT_END, Fault.ABORTED) and _pid_of(event) in killed)
        and not (event.fault in (Fault.SILENT_END, Fault.ABORTED) and _pid_of(event) in signalled)
        # A launcher's line about an exit code tells less than the rank's own exception, even one about a lost peer.
        and not (event.fault is Fault.EXIT and _rank_of(event) in raised)
    ]


def _pid_of(event: Event) -> int | None:
    """Returns the process id of an event, from its line or the name of its file."""
    found = re.search(r"process (\d{1,9})", event.who)
    return event.pid if found is None else int(found[1])


def _is_of_ray(event: Event) -> bool:
    """Returns True if a log of Ray's own processes holds the event."""
    return _OF_RAY.fullmatch(event.source.rpartition(":")[0].rpartition("/")[2]) is not None


def _rank_of(event: Event) -> str | None:
    """Returns the rank of an event, e.g. ``"rank 1"``; None if it names none."""
    return found[0] if (found := re.match(r"rank \d{1,6}", event.who)) is not None else None


def _explain(found: _Found) -> Explanation:
    events = sorted(found.events, key=lambda event: event.order)
    notes = [*found.notes, f"read: {found.logs} logs, {len(found.flights)} Flight Recorder files"]
    if found.unread_flights:
        files = counted(len(found.unread_flights), "Flight Recorder file")
        notes.append(f"not read: {files} ({_MOST_FLIGHTS} were read before)")
    if len(events) > _SHOWN:
        notes.append(f"not shown: {len(events) - _SHOWN} later events")
    slices = [one for flight in found.flights for one in _slices(flight)]
    return replace(_cause_in(events, found), notes=notes, slices=slices)


def _cause_in(events: Sequence[Event], found: _Found) -> Explanation:
    """Returns the root cause by the best evidence that there is: a cause in a log, our verdict, lesser signs.

    Args:
        events: In the order of `Event.order`.
        found: The rest of what was found.
    """
    rows = [_row(event, is_culprit=False) for event in events[:_SHOWN]]
    tier = events[0].order[0] if events else None
    # About shapes, the run's own verdict knows more than a log: it has compared those of all ranks.
    if tier == 0 and not (found.verdicts and events[0].fault is Fault.SHAPES):
        return _of_events(events)
    if found.verdicts:
        return _of_verdict(*found.verdicts[0], rows)
    if tier == 1:
        return _of_events(events)
    if (behind := lagging(found.flights, unread=frozenset(found.unread_flights))) is not None:
        return _of_flights(behind, rows)
    if events:
        return Explanation(
            verdict=f"not known, because no log says why a process died; the first sign: {_said(events[0])}",
            advice=ADVICE[events[0].fault],
            is_known=False,
            rows=rows,
        )
    return Explanation(
        verdict="not known, because no file here tells how a process ended",
        advice="give the folder with the logs of all ranks, or Ray's session folder, and the kernel's log (dmesg -T)",
        is_known=False,
    )


def _of_verdict(source: str, kept: KeptVerdict, rows: Sequence[Row]) -> Explanation:
    judged = Row(who="rl-safe", what="has judged the run", evidence=kept.verdict, source=source, is_culprit=True)
    return Explanation(
        verdict=kept.verdict,
        advice=kept.advice or "look at the ranks that it names; their stacks are beside it",
        cause=str(kept.fault or "verdict of the run"),
        culprits=[str(one) for one in sorted(kept.culprits)],
        rows=[judged, *rows],
    )


def _of_flights(behind: Lag, rows: Sequence[Row]) -> Explanation:
    of_ranks = [
        Row(who=f"rank {rank}", what=what, is_culprit=rank in behind.culprits) for rank, what in behind.ranks.items()
    ]
    return Explanation(
        verdict=behind.verdict,
        advice=FLIGHT_ADVICE,
        is_known=bool(behind.culprits),
        cause="rank outside the collective" if behind.culprits else "",
        culprits=[f"rank {rank}" for rank in behind.culprits],
        rows=[*of_ranks, *rows],
    )


def _of_events(events: Sequence[Event]) -> Explanation:
    first = events[0]
    same = [event for event in events if event.order[0] == first.order[0] and event.text == first.text]
    rivals = [
        event
        for event in events
        if event.order[0] == first.order[0]
        and event.text != first.text
        and event.who != first.who
        and (_pid_of(event) is None or _pid_of(event) != _pid_of(first))
        and event.source.rpartition(":")[0] != first.source.rpartition(":")[0]
        and not (event.is_timed and first.is_timed)
        and abs(event.at_s - first.at_s) < 1.0
    ]
    if rivals:
        verdict = f"not known, because no log tells which came first: {_said(first)}, or {_said(rivals[0])}"
        first, same = replace(first, who=""), []
    else:
        # Ray's driver prints its workers' output again.
        same = [event for event in same if event is first or _pid_of(event) is None or _pid_of(event) != _pid_of(first)]
        others = len({event.who for event in same} - {first.who})
        verdict = _said(first) + (f", and the same in {counted(others, 'other rank')}" if others else "")
    if first.fault is Fault.SHAPES:
        verdict += (
            "; which rank has another shape is not known, because gloo ends the receiver, and the sender may be wrong"
        )
        same = []
    return Explanation(
        verdict=verdict,
        advice=ADVICE[first.fault],
        is_known=not rivals,
        cause="" if rivals else str(first.fault),
        culprits=list(dict.fromkeys(event.who for event in same if event.who)),
        rows=[_row(event, is_culprit=event in same) for event in events[:_SHOWN]],
    )


def _said(event: Event) -> str:
    who, at = event.who or "a process", f" at {event.place}" if event.place else ""
    return f"{event.title}: {who}{at}: {event.text[:_SAID_CHARACTERS]} ({event.source})"


def _row(event: Event, *, is_culprit: bool) -> Row:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at_s)) if event.is_timed else ""
    what = f"{event.title}{f' at {event.place}' if event.place else ''}"
    what += " (it lived on, or may not be of this run)" if event.is_weak else ""
    return Row(
        who=event.who or "a process",
        what=what,
        is_culprit=is_culprit,
        when=when,
        evidence=event.text,
        source=event.source,
    )


def _slices(flight: Flight) -> Iterator[Slice]:
    for work in flight.works:
        yield Slice(
            track=f"rank {flight.global_rank}",
            name=f"{work.op}",
            start_s=work.created_s,
            end_s=work.created_s if work.has_ended else None,
            details={"group": work.group, "number": work.number, "has_ended": work.has_ended},
        )
