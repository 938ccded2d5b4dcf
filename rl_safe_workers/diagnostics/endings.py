"""Finds out why a process has ended, from its machine and its host. Each source gives a `Fault` and its evidence.

    the kernel's log     an OOM kill, a segmentation fault, a GPU's Xid: where this user may read it
    its own log          the end of its standard error, which Ray keeps in a file for each worker
    its last stacks      what faulthandler has written when a signal like SIGSEGV ended it
    its exit code        a signal, where its parent or `exit_statuses` can tell
    its control group    the number of OOM kills in it, compared with the number at the process's start
    its host             what Ray says of a dead actor: given to `joined`

Nothing is guessed. If no source tells the reason, the `Ending` lists the sources that were read.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rl_safe_workers.diagnostics.log_lines import Fault, LineFault, fault_of_kernel_line, fault_of_ray_exit
from rl_safe_workers.diagnostics.proc_facts import signal_name
from rl_safe_workers.diagnostics.remains import events_of_log
from rl_safe_workers.diagnostics.stacks import Stack
from rl_safe_workers.findings import counted
from rl_safe_workers.foreign_files import printable, read_foreign
from rl_safe_workers.platforms.host_memory import CGROUP, oom_kills

_KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES, _MOST_RECORDS = 8192, 50_000
_SAID_CHARACTERS = 200
_KILLS_BYTES = 2**16
_SLACK_S = 60.0
"""Largest gap between the kernel's clock and the wall clock. Older lines are about an earlier process of that id."""
_VICTIM = re.compile(r"Killed process \d+ \((?P<name>[^)]*)\).*anon-rss:(?P<kib>\d+)kB")
_SHARED_MEMORY, _FULL_BYTES = Path("/dev/shm"), 2**20
"""A file system with fewer free bytes than this counts as full."""
_OF_BUS_ERROR = ("SIGBUS", "Bus error")
_FATAL = re.compile(r"Fatal Python error: (.+)")
_FATAL_SIGNALS = {
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
    "Segmentation fault": "SIGSEGV",
}
"""Signals by faulthandler's words for them."""
_OWN_THREAD = "Current thread "
"""The head of the stack of the thread that got the signal, in faulthandler's text; absent if no Python runs in it."""
_SIGKILL = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a process has ended.

    Example: ``Ending(fault=Fault.OOM_KILL, said="the kernel killed python, which had 12.3 GiB")``
    """

    fault: Fault
    """`Fault.SILENT_END` if the reason is not known."""
    said: str
    """The evidence; if the reason is not known, why it is not."""
    detail: str = ""
    """A signal or a code."""
    place: str | None = None
    """The line of code that its last stacks show; None without stacks."""
    aborted_in: str = ""
    """The torch collective that Python was in when a thread of a library aborted the process; empty if none did."""

    @property
    def is_known(self) -> bool:
        """True if some source tells the reason."""
        return self.fault is not Fault.SILENT_END

    def __str__(self) -> str:
        if not self.is_known:
            return f"why is not known, because {self.said}"
        return f"{f'{self.fault} {self.detail}'.strip()}: {self.said}"


class KernelLine(NamedTuple):
    """A line of the kernel's log that tells of a failure."""

    at_s: float
    """Unix time in seconds."""
    text: str
    found: LineFault


class KernelLog(NamedTuple):
    """The failures in the kernel's log, or the reason why it could not be read."""

    lines: Sequence[KernelLine]
    complaint: str = ""
    """Empty if it could be read."""


class Signs(NamedTuple):
    """The signs that a machine has of processes that have ended on it."""

    kernel: KernelLog
    shared_free_bytes: int | None
    """Bytes that ``/dev/shm`` has left; None if unknown."""
    logs: Path | None = None
    """The folder of Ray's logs; None without Ray."""


def look_around(logs: Path | None = None) -> Signs:
    """Reads the signs that this machine has of ended processes. Takes milliseconds.

    Args:
        logs: The folder of Ray's logs on this machine; None without Ray.
    """
    free = None
    with suppress(OSError):
        about = os.statvfs(_SHARED_MEMORY)
        free = about.f_bavail * about.f_frsize
    return Signs(kernel=read_kernel_log(), shared_free_bytes=free, logs=logs)


def read_kernel_log(path: Path = _KERNEL_LOG) -> KernelLog:
    """Reads the lines of the kernel's log that tell of a failure, oldest first."""
    lines: list[KernelLine] = []
    started_s = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return KernelLog([], f"the kernel's log cannot be read ({error.strerror})")
    try:
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(descriptor, _RECORD_BYTES)
            except OSError as error:
                if error.errno == errno.EPIPE:
                    continue  # the kernel has overwritten the next record
                if error.errno == errno.EAGAIN:
                    break
                return KernelLog(lines, f"the kernel's log cannot be read ({error.strerror})")
            if not record:
                break
            head, _, text = record.decode("utf-8", errors="replace").partition(";")
            fields = head.split(",")
            if len(fields) > 2 and fields[2].isdecimal():
                line = printable(text.partition("\n")[0])
                if (found := fault_of_kernel_line(line)) is not None:
                    lines.append(KernelLine(started_s + int(fields[2]) / 1e6, line, found))
    finally:
        os.close(descriptor)
    return KernelLog(lines)


def ending_of(
    pid: int,
    signs: Signs,
    *,
    exit_code: int | None,
    kills: Path | None,
    noted_s: float | None,
    last_stacks: str = "",
) -> Ending:
    """Finds out why a process of this machine has ended.

    Args:
        pid: The process.
        signs: From `look_around`.
        exit_code: Its exit code, negative for a signal; None if nobody can tell.
        kills: The file that `answering.note_kills` wrote for it; None if it wrote none.
        noted_s: Unix time, in seconds, when it was last known to live; None if nobody knows.
        last_stacks: From `rank_files.read_fatal`.
    """
    since_s = 0.0 if noted_s is None else noted_s - _SLACK_S
    lines = [line for line in signs.kernel.lines if line.at_s >= since_s]
    own = [line for line in lines if line.found.pid == pid]
    for wanted in (Fault.OOM_KILL, Fault.XID):
        for line in own:
            if line.found.fault is wanted:
                return Ending(fault=wanted, said=_victim(line.text), detail=line.found.detail)
    logged, silence = _of_own_log(pid, signs)
    if logged is not None:
        return logged
    if own:
        return _of_signal(own[-1].found.detail, _cut(own[-1].text), signs)
    if (told := _of_last_stacks(last_stacks, signs)) is not None:
        return told
    if exit_code is not None and exit_code < 0 and exit_code != -_SIGKILL:
        return _of_signal(signal_name(-exit_code), "its exit status says so", signs)
    if exit_code is not None and exit_code > 0:
        return Ending(fault=Fault.EXIT, said="its exit status says so", detail=str(exit_code))
    more, is_counted = (0, False) if kills is None else _more_kills(kills)
    if more > 0:
        said = f"its control group counts {counted(more, 'kill')} since it began"
        return Ending(fault=Fault.OOM_KILL, said=f"{said}{_others_killed(lines)}")
    xids = [line for line in lines if line.found.fault is Fault.XID and line.found.pid is None]
    if noted_s is not None and xids:
        return Ending(fault=Fault.XID, said=_cut(xids[-1].text), detail=xids[-1].found.detail)
    reasons = [
        *(["it got SIGKILL from an unknown sender"] if exit_code == -_SIGKILL else []),
        signs.kernel.complaint or "the kernel's log does not name it",
        "its control group counts no OOM kill" if is_counted else "its control group does not count OOM kills",
        silence,
    ]
    return Ending(fault=Fault.SILENT_END, said=", ".join(reasons[:-1]) + f", and {reasons[-1]}")


def ending_by_ray(text: str) -> Ending | None:
    """Returns the ending that Ray reports for a dead actor; None if Ray only reports that the actor is gone."""
    if (found := fault_of_ray_exit(text)) is None:
        return None
    said = next((line for line in reversed(text.strip().splitlines()) if fault_of_ray_exit(line) is not None), text)
    return Ending(
        fault=found.fault, said=f"Ray says: {_cut(said.rpartition('Worker exit detail: ')[2])}", detail=found.detail
    )


def joined(of_host: Ending | None, of_machine: Ending | None) -> Ending | None:
    """Returns the more precise of two endings of a process: the host's or the machine's."""
    if of_host is not None and of_host.fault in (Fault.RAY_MEMORY, Fault.NODE_LOST):
        return of_host  # Ray ended it on purpose, or the node's own signs are lost with it
    if of_machine is not None and of_machine.is_known:
        return of_machine
    return of_host if of_host is not None and of_host.is_known else of_machine or of_host


def _of_signal(name: str, said: str, signs: Signs) -> Ending:
    """Returns the ending by a signal. A bus error can also mean that ``/dev/shm`` is full."""
    if name in _OF_BUS_ERROR and signs.shared_free_bytes is not None and signs.shared_free_bytes < _FULL_BYTES:
        left = f"{signs.shared_free_bytes} bytes are left"
        return Ending(fault=Fault.SHARED_MEMORY, said=f"{name} ({said}), and {left}")
    fault = {"SIGABRT": Fault.ABORTED, "SIGTERM": Fault.ASKED, "SIGINT": Fault.ASKED}.get(name, Fault.SIGNAL)
    return Ending(fault=fault, said=said, detail=name)


def _of_last_stacks(text: str, signs: Signs) -> Ending | None:
    """Returns the ending that faulthandler's stacks tell; None if it has written nothing."""
    if (found := _FATAL.match(text)) is None:
        return None
    head, is_of_python, own = text.partition(_OWN_THREAD)
    stack = Stack.parse(is_of_python + own.partition("\n\n")[0] if is_of_python else head)
    place = None if stack.place is None else str(stack.place)
    name = _FATAL_SIGNALS.get(found[1], found[1])
    told = replace(_of_signal(name, f"faulthandler says {found[1]}", signs), place=place)
    if told.fault is not Fault.ABORTED or is_of_python or stack.op is None:
        return told
    return replace(told, said=f"by a thread of a library, during {stack.op}", aborted_in=stack.op)


def _own_log(pid: int, signs: Signs) -> Path | None:
    """Returns the file of the standard error of one of Ray's workers."""
    if signs.logs is None:
        return None
    return max(signs.logs.glob(f"worker-*-{pid}.err"), key=lambda path: path.stat().st_mtime, default=None)


def _of_own_log(pid: int, signs: Signs) -> tuple[Ending | None, str]:
    """Returns the ending that the process's own log tells; if there is none, also the reason in words."""
    try:
        if (log := _own_log(pid, signs)) is None:
            return None, "no log of its own is here"
        events = [event for event in events_of_log(log, log.name) if not event.is_weak]
    except OSError as error:
        return None, f"its log cannot be read ({error.strerror})"
    if not events:
        return None, "its log ends without a word"
    told = min(events, key=lambda event: event.order)
    said = f"{told.text[:_SAID_CHARACTERS]}{f' at {told.place}' if told.place else ''}"
    if told.fault is Fault.SIGNAL:
        return _of_signal(told.detail, said, signs), ""
    if told.fault is Fault.ABORTED:  # torch aborts a process after a wait in vain; an earlier line names the wait
        waits = [event.text for event in events if event.fault.tier >= 2 or event.fault is Fault.NCCL]
        said = waits[-1][:_SAID_CHARACTERS] if waits else said
    return Ending(fault=told.fault, said=said, detail=told.detail), ""


def _others_killed(lines: Iterable[KernelLine]) -> str:
    """Returns, in words, the last OOM kill in the kernel's log. Its process ids differ from a container's."""
    killed = [line.text for line in lines if line.found.fault is Fault.OOM_KILL and _VICTIM.search(line.text)]
    return f"; the last in the kernel's log: {_victim(killed[-1])}" if killed else ""


def _victim(text: str) -> str:
    if (found := _VICTIM.search(text)) is not None:
        return f"the kernel killed {found['name']}, which had {int(found['kib']) / 2**20:.1f} GiB"
    return _cut(text)


def _cut(text: str) -> str:
    return text.strip()[:_SAID_CHARACTERS]


def _more_kills(file: Path) -> tuple[int, bool]:
    """Returns the number of OOM kills since a process noted it, and True if its control group counts them."""
    try:
        noted = json.loads(read_foreign(file, limit_bytes=_KILLS_BYTES, within=file.parent, uid=os.getuid()))
    except (OSError, ValueError):
        return 0, False
    if not isinstance(noted, Mapping) or not noted:
        return 0, False
    known = {Path(name): kills for name, kills in noted.items() if isinstance(kills, int)}
    places = [path for path in known if path.is_relative_to(CGROUP) and ".." not in path.parts]
    now = oom_kills(places)
    return max([now[path] - known[path] for path in now], default=0), bool(now)
