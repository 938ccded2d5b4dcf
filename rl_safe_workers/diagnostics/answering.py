"""Lets a rank tell others where it is, whatever its main thread is doing.

Up to nine files end up in a folder of the run on the rank's own machine:

    request_<role>_<rank>.pipe a reader writes one byte here to ask for the next two files
    stack_<role>_<rank>.txt    the stacks of all threads, added each time that somebody asks, or at `STACK_SIGNAL`
    flight_gloo_<rank>         of trainers: torch's Flight Recorder record of gloo's groups
    place_<role>_<rank>.txt    the last line of code that the rank noted, its process id, and the last lines at which it
                               stood for long; outlives the process
    phase_<role>_<rank>.txt    the phase that the rank is in, if its host calls `note_phase`; outlives the process
    kills_<role>_<rank>.json   the number of OOM kills in its control group when it began
    failure_<role>_<rank>.json what the rank has failed with, if its host calls `leave_failure`
    exit_<role>_<rank>.txt     the status that the process passed to `os._exit`, and the line of code of that call
    fatal_<role>_<rank>.txt    the stacks at a signal such as SIGSEGV that ends the process, if faulthandler was off

Nothing here needs torch, Ray or a driver. torch itself writes the Flight Recorder's file for NCCL.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from rl_safe_workers.control.deadline import Thread
from rl_safe_workers.diagnostics.proc_facts import lock_holder
from rl_safe_workers.diagnostics.stacks import CallFrame, Stack
from rl_safe_workers.errors import RunError, in_one_line
from rl_safe_workers.foreign_files import printable, read_foreign
from rl_safe_workers.frames import frames_of_thread, own_stacks, place_of, telling_frame
from rl_safe_workers.lifecycle import unix_now
from rl_safe_workers.platforms.host_memory import oom_kills
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.root_cause import report_from_text, report_of, report_to_text

logger = logging.getLogger(__name__)

STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write its stacks. Ray's workers do not use this signal; Ray Tune uses SIGUSR1.

It is the last resort, for a rank that answers no request because a call in C keeps Python's lock (the GIL).
faulthandler writes without that lock. If a thread runs Python meanwhile, faulthandler may read a frame while it
changes. That can end the process by SIGSEGV.
"""
GLOO_FLIGHTS = "flight_gloo_"
"""The start of the names of gloo's Flight Recorder files."""
ALIVE_EVERY_S = 0.5
"""Seconds between two signs of life of a rank, and at least between two notes of where it is."""
STAY_S = 2.0
"""A rank notes a line of code if it stands there for at least so many seconds."""
_STAYS = 3
_PLACE_CHARACTERS = 800
NOTE_SHARE = 0.004
"""Largest share of one core for the notes. A note takes 0.5 ms with 2 threads and 5 ms with 40: the more it takes, the
longer is the pause to the next one."""
_PLACES = {role: re.compile(rf"place_{role}_(\d+)\.txt") for role in Role}
_PIPES = {role: re.compile(rf"request_{role}_(\d+)\.pipe") for role in Role}
_NOTED = "Noted: "
"""The start of a line about an event, after the stacks."""
_EVENT_CHARACTERS = 300
_spare: list[int] = []
"""A file descriptor that is kept for `leave_failure`."""
_events: dict[str, str] = {}
"""The events that `note_event` has kept, by kind, oldest first."""
_PLACE_BYTES = 4096
_FAILURE_BYTES = 2**20
_FATAL_BYTES = 2**20


def stack_file(rank_id: RankId) -> str:
    """Returns the name of the file that a rank writes its stacks to."""
    return f"stack_{rank_id.role}_{rank_id.rank}.txt"


def request_pipe(rank_id: RankId) -> str:
    """Returns the name of the pipe by which others ask a rank for its stacks and its Flight Recorder's record."""
    return f"request_{rank_id.role}_{rank_id.rank}.pipe"


def place_file(rank_id: RankId) -> str:
    """Returns the name of the file in which a rank notes where it is."""
    return f"place_{rank_id.role}_{rank_id.rank}.txt"


def read_place(folder: Path, rank_id: RankId) -> str | None:
    """Returns the line of code that a rank was last seen at, e.g. ``"train.py:12 (step)"``; None if nobody knows.

    Args:
        folder: The folder that was passed to `answer_when_asked`.
        rank_id: The rank, dead or alive.
    """
    with suppress(OSError):
        text = read_foreign(folder / place_file(rank_id), limit_bytes=_PLACE_BYTES, within=folder, uid=os.getuid())
        return text.decode("utf-8", errors="replace").partition("\n")[0].strip() or None
    return None


@dataclass(frozen=True, slots=True)
class Stay:
    """A line of code at which a rank stood for at least `STAY_S`, as its notes show."""

    since_s: float
    """Unix time in seconds at which the rank first noted the line."""
    until_s: float
    """Unix time in seconds at which the rank last noted the line."""
    holder: int
    """The process that held a file lock for which the rank waited there; 0 if none did."""
    place: str

    def __str__(self) -> str:
        return f"{self.since_s:.3f} {self.until_s:.3f} {self.holder} {self.place}"

    @property
    def is_long(self) -> bool:
        """True if it lasted for `STAY_S`."""
        return self.until_s - self.since_s >= STAY_S


def read_stays(folder: Path, rank_id: RankId) -> list[Stay]:
    """Returns the last lines of code at which a rank stood for long, oldest first.

    Args:
        folder: The folder that was passed to `answer_when_asked`.
        rank_id: The rank, dead or alive.
    """
    found = []
    with suppress(OSError, ValueError):
        text = read_foreign(folder / place_file(rank_id), limit_bytes=_PLACE_BYTES, within=folder, uid=os.getuid())
        for line in text.decode("utf-8", errors="replace").split("\n")[2:-1]:
            since, until, holder, place = line.split(" ", 3)
            found.append(Stay(float(since), float(until), int(holder), place))
    return found


def phase_file(rank_id: RankId) -> str:
    """Returns the name of the file in which a rank notes its phase."""
    return f"phase_{rank_id.role}_{rank_id.rank}.txt"


def note_phase(folder: Path, rank_id: RankId, phase: str | None) -> None:
    """Notes the phase that this rank has entered. The note outlives the process. A failure to write it is logged.

    Args:
        folder: The folder that was passed to `answer_when_asked`.
        rank_id: This process.
        phase: The phase; None: it is outside of phases.
    """
    try:
        descriptor = open_anew(folder / phase_file(rank_id))
        try:
            os.write(descriptor, (phase or "").encode())
        finally:
            os.close(descriptor)
    except OSError as lost:
        logger.warning("%s cannot note its phase in %s: %s", rank_id, folder, lost)


def read_phase(folder: Path, rank_id: RankId) -> str | None:
    """Returns the phase that a rank has noted; None if it was outside of phases, or nobody knows.

    Args:
        folder: The folder that was passed to `answer_when_asked`.
        rank_id: The rank, dead or alive.
    """
    with suppress(OSError):
        text = read_foreign(folder / phase_file(rank_id), limit_bytes=_PLACE_BYTES, within=folder, uid=os.getuid())
        return text.decode("utf-8", errors="replace") or None
    return None


def ranks_by_process(folder: Path) -> dict[int, RankId]:
    """Returns the ranks that have noted where they are, by the ids of their processes, dead or alive.

    Args:
        folder: The folder that was passed to `answer_when_asked`.
    """
    found = {}
    for file in folder.glob("place_*.txt"):
        with suppress(OSError):
            text = read_foreign(file, limit_bytes=_PLACE_BYTES, within=folder, uid=os.getuid())
            pid = text.decode("utf-8", errors="replace").split("\n")[1:2]
            rank_id = rank_of_place(file.name)
            if rank_id is not None and pid and pid[0].isdecimal():
                found[int(pid[0])] = rank_id
    return found


def rank_of_place(name: str) -> RankId | None:
    """Returns the rank whose `place_file` has a name; None if it is no such file."""
    return _rank_of(name, _PLACES)


def rank_of_pipe(name: str) -> RankId | None:
    """Returns the rank whose `request_pipe` has a name; None if it is no such pipe."""
    return _rank_of(name, _PIPES)


def _rank_of(name: str, patterns: Mapping[Role, re.Pattern[str]]) -> RankId | None:
    for role, pattern in patterns.items():
        if (found := pattern.fullmatch(name)) is not None:
            return RankId(role, int(found[1]))
    return None


def failure_file(rank_id: RankId) -> str:
    """Returns the name of the file that holds what a rank has failed with."""
    return f"failure_{rank_id.role}_{rank_id.rank}.json"


def kills_file(rank_id: RankId) -> str:
    """Returns the name of the file in which a rank notes the OOM kills of its control group when it begins."""
    return f"kills_{rank_id.role}_{rank_id.rank}.json"


def exit_file(rank_id: RankId) -> str:
    """Returns the name of the file in which a rank notes that it calls `os._exit`."""
    return f"exit_{rank_id.role}_{rank_id.rank}.txt"


def read_exit(folder: Path, rank_id: RankId) -> tuple[int, str] | None:
    """Returns the status that a rank passed to `os._exit`, and the line of code of the call; None without a call.

    Args:
        folder: The folder that was passed to `answer_when_asked`.
        rank_id: The rank.
    """
    with suppress(OSError, ValueError):
        text = read_foreign(folder / exit_file(rank_id), limit_bytes=_PLACE_BYTES, within=folder, uid=os.getuid())
        status, _, place = text.decode("utf-8", errors="replace").partition("\n")
        return int(status), printable(place)
    return None


def _note_exit(file: Path) -> None:
    """Makes `os._exit` write a note first: it runs no handlers, and a launcher takes status 0 for success."""
    leave, pid = os._exit, os.getpid()

    def leave_with_a_note(status: int) -> NoReturn:
        if os.getpid() == pid:  # a forked child does not note its own exit
            with suppress(OSError):
                descriptor = open_anew(file)
                place = telling_frame(frames_of_thread(threading.current_thread()))
                os.write(descriptor, f"{status}\n{place}".encode(errors="replace"))
        leave(status)

    os._exit = leave_with_a_note


def fatal_file(rank_id: RankId) -> str:
    """Returns the name of the file that a rank writes its stacks to when a signal like SIGABRT ends it."""
    return f"fatal_{rank_id.role}_{rank_id.rank}.txt"


def read_fatal(folder: Path, rank_id: RankId) -> str:
    """Returns the stacks that a rank wrote when a signal ended it. Returns an empty text if it wrote none.

    Args:
        folder: The folder that was passed to `answer_when_asked`.
        rank_id: The rank, dead or alive.
    """
    with suppress(OSError):
        text = read_foreign(folder / fatal_file(rank_id), limit_bytes=_FATAL_BYTES, within=folder, uid=os.getuid())
        return text.decode("utf-8", errors="replace")
    return ""


def _tell_fatal_signals(file: Path) -> None:
    """Makes faulthandler write to a file when a signal ends this process. Changes nothing if it is on already."""
    if faulthandler.is_enabled():
        return
    descriptor = open_anew(file)
    faulthandler.enable(file=descriptor, all_threads=True)

    def in_child() -> None:
        # The end of a child, such as a data loader's worker, is not this process's.
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, descriptor, inheritable=False)
        os.close(nowhere)

    os.register_at_fork(after_in_child=in_child)


def note_kills(folder: Path, rank_id: RankId) -> None:
    """Notes how many OOM kills this process's control group has now, to compare after the process has ended."""
    with os.fdopen(open_anew(folder / kills_file(rank_id)), "w", encoding="utf-8") as file:
        json.dump({str(path): kills for path, kills in oom_kills().items()}, file)


def leave_failure(folder: Path, error: Exception, rank_id: RankId, phase: str) -> None:
    """Writes this rank's failure to a file for later readers. A failure to write it is logged.

    Args:
        folder: The folder that was passed to `answer_when_asked`.
        error: The error that the rank has caught.
        rank_id: This process.
        phase: The phase that the rank was in.
    """
    text = report_to_text(report_of(error, rank_id, phase))
    unfinished = folder / f"unfinished_{failure_file(rank_id)}"
    # The failure may be that this process can open no more files.
    while _spare:
        os.close(_spare.pop())
    try:
        with os.fdopen(open_anew(unfinished), "w", encoding="utf-8") as file:
            file.write(text)
        unfinished.rename(folder / failure_file(rank_id))
    except OSError as lost:
        logger.warning("%s cannot leave its failure in %s: %s", rank_id, folder, lost)


def read_failure(folder: Path, rank_id: RankId) -> RunError | None:
    """Reads the failure that `leave_failure` has written for a rank. Returns None if it has written none.

    A file that cannot be read counts as none, and is logged.

    Args:
        folder: The folder that was passed to `answer_when_asked`.
        rank_id: The rank, dead or alive.
    """
    file = folder / failure_file(rank_id)
    try:
        return report_from_text(read_foreign(file, limit_bytes=_FAILURE_BYTES, within=folder, uid=os.getuid()))
    except FileNotFoundError:
        return None  # it has left none
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read: %s", file, error)
        return None


def last_alive_s(folder: Path, rank_id: RankId) -> float | None:
    """Returns the Unix time, in seconds, of a rank's last sign of life; None if there was none.

    If the process has ended, it ended less than `ALIVE_EVERY_S` after this time, unless it was stopped before. Its
    last note of where it was may be older: a process with many threads makes notes less often, because they cost more.
    """
    with suppress(OSError):
        return (folder / place_file(rank_id)).lstat().st_mtime
    return None


def answer_when_asked(
    folder: Path,
    rank_id: RankId,
    call_frame: CallFrame | None = None,
    *,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Lets others find out where this process is. Call it once, on the main thread, early.

    It changes the process. It replaces any handler of `STACK_SIGNAL`. It wraps ``os._exit`` and
    ``threading.excepthook``, and calls the earlier functions. It turns faulthandler on if that is off, and starts two
    threads.

    Args:
        folder: A folder of the run that only its user may write. The process keeps open what it makes there.
        rank_id: This process.
        call_frame: The function in which the host's calls run. None: the process is always in a call, on its main
            thread, as a script is.
        look: Called every `ALIVE_EVERY_S` on the thread that makes the notes, e.g. to watch another rank.
    """
    for name in (failure_file(rank_id), phase_file(rank_id), fatal_file(rank_id), exit_file(rank_id)):
        (folder / name).unlink(missing_ok=True)  # of an earlier process
    if not _spare:
        _spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    note_kills(folder, rank_id)
    _note_ended_threads()
    _note_exit(folder / exit_file(rank_id))
    _tell_fatal_signals(folder / fatal_file(rank_id))
    stacks = open_anew(folder / stack_file(rank_id), os.O_APPEND)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True, chain=False)
    start_thread("place", _note_places, folder / place_file(rank_id), call_frame, look)
    pipe = folder / request_pipe(rank_id)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe, 0o600)
    # Open the pipe for writing as well. A read then waits even if no other process has the pipe open.
    start_thread("answers", _answer_requests, os.open(pipe, os.O_RDWR | os.O_CLOEXEC), stacks, folder, rank_id)


def note_event(kind: str, error: BaseException, said: str) -> None:
    """Keeps an error that may later block this process. Others read it when they ask where the process is.

    Args:
        kind: A later event of the same kind takes its place.
        error: The error.
        said: The event in words, e.g. ``"its thread prefetch has ended"``.
    """
    at = "" if (place := place_of(error)) is None else f" at {place}"
    _events.pop(kind, None)
    _events[kind] = printable(f"{said}{at}: {in_one_line(error)}"[:_EVENT_CHARACTERS])


def events_of(text: str) -> list[str]:
    """Returns the events that a rank has kept by `note_event`, oldest first, from the text of its stacks."""
    return [line.removeprefix(_NOTED) for line in text.splitlines() if line.startswith(_NOTED)]


def _note_ended_threads() -> None:
    """Notes each thread of this process that an exception ends. Calls the earlier hook, too."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            name = "" if args.thread is None else f" {args.thread.name}"
            note_event("thread", args.exc_value, f"its thread{name} has ended")
        before(args)

    threading.excepthook = hook


def start_thread(name: str, work: Callable[..., object], *args: object) -> threading.Thread:
    """Starts a thread that lives as long as the process, and returns it."""
    thread = Thread(work, args=args, name=name)
    thread.start()
    return thread


def open_anew(file: Path, flag: int = 0) -> int:
    """Opens a file for writing, empty, whatever an earlier process has left there. Follows no link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(file, flags | flag, 0o600)


def _note_places(file: Path, call_frame: CallFrame | None, look: Callable[[], object]) -> None:
    descriptor = open_anew(file)
    written, due_s = b"", time.monotonic()
    stays: deque[Stay] = deque(maxlen=_STAYS)
    now = Stay(unix_now(), unix_now(), 0, "")
    pause = threading.Event()
    while True:
        with suppress(OSError):  # the disk is full: there may be room for the next note
            if time.monotonic() >= due_s:
                began_s = time.thread_time()
                place = _place_now(call_frame) or ""
                if place == now.place:
                    now = replace(now, until_s=unix_now(), holder=lock_holder() if now.is_long else 0)
                else:
                    stays.extend([now] if now.is_long else [])
                    now = Stay(unix_now(), unix_now(), 0, place)
                told = "".join(
                    f"{stay}\n" for stay in (*stays, now) if stay.is_long and 0 < len(stay.place) < _PLACE_CHARACTERS
                )
                rest = f"\n{os.getpid()}\n{told}".encode(errors="replace")
                if (text := place.encode(errors="replace")[: _PLACE_BYTES - len(rest)] + rest) != written:
                    # In this order, so that a process killed in between leaves a line and a rest, never nothing.
                    os.pwrite(descriptor, text, 0)
                    os.ftruncate(descriptor, len(text))
                    written = text
                due_s = time.monotonic() + (time.thread_time() - began_s) / NOTE_SHARE
            os.utime(descriptor)
        look()
        pause.wait(ALIVE_EVERY_S)


def stack_of_call(call_frame: CallFrame) -> Stack | None:
    """Returns the stack of a host's call in this process; None if there is no such call."""
    stack = Stack.here(call_frame)
    return stack if stack.is_in_a_call else None


def _place_now(call_frame: CallFrame | None) -> str | None:
    """Returns the line that the host's call is at, e.g. ``"train.py:12 (step)"``; else that of the main thread.

    Args:
        call_frame: As for `answer_when_asked`.
    """
    stack = Stack.here(call_frame)
    known = stack.place if stack.is_in_a_call else None
    return None if known is None else str(known)


def _answer_requests(requests: int, stacks: int, folder: Path, rank_id: RankId) -> None:
    while os.read(requests, 1):
        with suppress(OSError):  # the disk is full: whoever asks finds no answer
            text = own_stacks() + "".join(f"{_NOTED}{one}\n" for one in list(_events.values()))
            os.write(stacks, text.encode(errors="replace"))
            if rank_id.role is Role.TRAINER:
                _write_flights(folder, rank_id.rank)


def _write_flights(folder: Path, rank: int) -> None:
    # Not imported here: what the process has not imported has recorded nothing.
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace", None)
    unfinished = folder / f"unfinished_gloo_{rank}"
    unfinished.write_bytes(b"" if dump is None else dump(True, False, False))
    unfinished.rename(folder / f"{GLOO_FLIGHTS}{rank}")
