"""Lets a rank tell others where it is, whatever its main thread is doing.

It writes the files that `diagnostics.rank_files` lists. Nothing here needs torch, Ray or a driver.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from rl_safe_workers.control.deadline import Thread
from rl_safe_workers.diagnostics.proc_facts import lock_holder
from rl_safe_workers.diagnostics.rank_files import (
    GLOO_FLIGHTS,
    NOTED,
    PHASE_BYTES,
    PLACE_BYTES,
    Stay,
    exit_file,
    failure_file,
    fatal_file,
    kills_file,
    phase_file,
    place_file,
    request_pipe,
    stack_file,
)
from rl_safe_workers.diagnostics.stacks import CallFrame, Stack
from rl_safe_workers.errors import in_one_line
from rl_safe_workers.foreign_files import printable
from rl_safe_workers.frames import frames_of_thread, own_stacks, place_of, telling_frame
from rl_safe_workers.lifecycle import unix_now
from rl_safe_workers.platforms.host_memory import oom_kills
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.root_cause import report_of, report_to_text

logger = logging.getLogger(__name__)

STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank write its stacks. Ray's workers do not use this signal; Ray Tune uses SIGUSR1.

It is the last resort, for a rank that answers no request because a call in C keeps Python's lock (the GIL).
faulthandler writes without that lock. If a thread runs Python meanwhile, faulthandler may read a frame while it
changes. That can end the process by SIGSEGV.
"""
ALIVE_EVERY_S = 0.5
"""Seconds between two signs of life of a rank, and at least between two notes of where it is."""
_STAYS = 3
_PLACE_CHARACTERS = 800
NOTE_SHARE = 0.004
"""Largest share of one core for the notes. A note takes 0.5 ms with 2 threads and 5 ms with 40: the more it takes, the
longer is the pause to the next one."""
_EVENT_CHARACTERS = 300
_spare: list[int] = []
"""A file descriptor that is kept for `leave_failure`."""
_phase_notes: dict[Path, int] = {}
"""The file descriptors of the files that `note_phase` has written."""
_events: dict[str, str] = {}
"""The events that `note_event` has kept, by kind, oldest first."""


def note_phase(folder: Path, rank_id: RankId, phase: str | None) -> None:
    """Notes the phase that this rank has entered. The note outlives the process. A failure to write it is logged.

    The note overwrites the one before. To empty the file first would make a step wait for the disk: the kernel waits
    until it has written the old contents, and ext4 writes the new ones at once when the file is closed.

    Args:
        folder: The folder that was passed to `answer_when_asked`.
        rank_id: This process.
        phase: The phase; None: it is outside of phases.
    """
    file = folder / phase_file(rank_id)
    try:
        if file not in _phase_notes:
            _phase_notes[file] = open_anew(file)
        os.pwrite(_phase_notes[file], (phase or "").encode()[:PHASE_BYTES].ljust(PHASE_BYTES), 0)
    except OSError as lost:
        logger.warning("%s cannot note its phase in %s: %s", rank_id, folder, lost)


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


class _PlaceNotes:
    """Writes this rank's `place_file`: where it is now, and where it stood for long."""

    def __init__(self, file: Path, call_frame: CallFrame | None) -> None:
        self._descriptor, self._call_frame = open_anew(file), call_frame
        self._written, self._due_s = b"", time.monotonic()
        self._stays: deque[Stay] = deque(maxlen=_STAYS)
        self._now = Stay(unix_now(), unix_now(), 0, "")

    def note(self) -> None:
        """Notes where the rank is, if that is due; else only that it is alive."""
        if time.monotonic() >= self._due_s:
            began_s = time.thread_time()
            self._look()
            self._write()
            self._due_s = time.monotonic() + (time.thread_time() - began_s) / NOTE_SHARE
        os.utime(self._descriptor)

    def _look(self) -> None:
        place, now = _place_now(self._call_frame) or "", self._now
        if place == now.place:
            self._now = replace(now, until_s=unix_now(), holder=lock_holder() if now.is_long else 0)
        else:
            self._stays.extend([now] if now.is_long else [])
            self._now = Stay(unix_now(), unix_now(), 0, place)

    def _write(self) -> None:
        long = [one for one in (*self._stays, self._now) if one.is_long and 0 < len(one.place) < _PLACE_CHARACTERS]
        rest = "".join([f"\n{os.getpid()}\n", *(f"{stay}\n" for stay in long)]).encode(errors="replace")
        text = self._now.place.encode(errors="replace")[: PLACE_BYTES - len(rest)] + rest
        if text != self._written:
            # In this order, so that a process killed in between leaves a line and a rest, never nothing.
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))
            self._written = text


def _note_places(file: Path, call_frame: CallFrame | None, look: Callable[[], object]) -> None:
    notes, pause = _PlaceNotes(file, call_frame), threading.Event()
    while True:
        with suppress(OSError):  # the disk is full: there may be room for the next note
            notes.note()
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
            text = own_stacks() + "".join(f"{NOTED}{one}\n" for one in list(_events.values()))
            os.write(stacks, text.encode(errors="replace"))
            if rank_id.role is Role.TRAINER:
                _write_flights(folder, rank_id.rank)


def _write_flights(folder: Path, rank: int) -> None:
    # Not imported here: what the process has not imported has recorded nothing.
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace", None)
    unfinished = folder / f"unfinished_gloo_{rank}"
    unfinished.write_bytes(b"" if dump is None else dump(True, False, False))
    unfinished.rename(folder / f"{GLOO_FLIGHTS}{rank}")
