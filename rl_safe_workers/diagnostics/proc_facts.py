"""Reads the operating system's facts about any process from ``/proc``. Changes nothing.

A read of ``/proc`` may block if the process hangs in the kernel. Callers limit the time (`control.deadline.attempt`).
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rl_safe_workers.platforms.host_memory import group_memory

_PROC = Path("/proc")
_RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
_SYSTEM_CALLS: Mapping[str, Mapping[int, str]] = {
    "x86_64": {
        0: "read",
        1: "write",
        7: "poll",
        17: "pread64",
        18: "pwrite64",
        19: "readv",
        20: "writev",
        23: "select",
        35: "nanosleep",
        42: "connect",
        43: "accept",
        45: "recvfrom",
        47: "recvmsg",
        61: "wait4",
        72: "fcntl",
        73: "flock",
        74: "fsync",
        75: "fdatasync",
        202: "futex",
        230: "clock_nanosleep",
        232: "epoll_wait",
        247: "waitid",
        257: "openat",
        270: "pselect6",
        271: "ppoll",
        281: "epoll_pwait",
    },
    "aarch64": {
        22: "epoll_pwait",
        25: "fcntl",
        32: "flock",
        56: "openat",
        63: "read",
        64: "write",
        65: "readv",
        66: "writev",
        67: "pread64",
        68: "pwrite64",
        72: "pselect6",
        73: "ppoll",
        82: "fsync",
        83: "fdatasync",
        95: "waitid",
        98: "futex",
        101: "nanosleep",
        115: "clock_nanosleep",
        202: "accept",
        203: "connect",
        207: "recvfrom",
        212: "recvmsg",
        260: "wait4",
    },
}
"""Names of system calls that a process may wait in, by machine and number."""
_OF_A_FILE = frozenset(
    {"read", "write", "pread64", "pwrite64", "readv", "writev", "fcntl", "flock", "fsync", "fdatasync"}
    | {"recvfrom", "recvmsg", "connect", "accept"}
)
"""System calls whose first argument is a file descriptor."""
_WRITES = ("write", "pwrite")
_COMMAND_CHARACTERS = 200
_LOCK = re.compile(r"^(\d+): (-> )?\S+\s+\S+\s+\S+\s+(\d+) ")
_TORCHRUN = re.compile(r"\btorchrun\b|\btorch[./]distributed[./](run|launch)\b")
"""Finds torchrun in a command line."""
RUNS, STOPPED_BY_SIGNAL, NO_PROCESS = "R", "T", "-"
"""States of a process, by the letters of ``/proc/PID/stat``; ``-`` is not the kernel's. A debugger's stop is ``t``."""
STOPPED, DISK_SLEEP, GONE = frozenset({STOPPED_BY_SIGNAL, "t"}), frozenset("D"), frozenset({*"ZXx", NO_PROCESS})
"""Kinds of these states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """A process, as the operating system sees it.

    Example: ``ProcessFacts(pid=4711, state="T", parent=1)``
    """

    pid: int
    state: str
    """The letter of ``/proc/PID/stat``: ``R``, ``S``, ``D``, ``T``, ``t``, ``Z``; ``-`` if there is no process."""
    parent: int = 0
    user: int = -1
    command: str = ""
    variables: Mapping[str, str] | None = None
    """Its environment when it was started, as far as it tells about ranks; None if it may not be read."""
    kernel_wait: str = ""
    """The kernel function that it waits in (``wchan``); empty if it runs, or if the kernel does not say."""
    system_call: str = ""
    """Name of the system call that the thread is in; empty if it is in none that is known here."""
    file: str = ""
    """Path of the file, pipe or socket that the system call is about."""
    mount: str = ""
    """Mount point, file system and source of that file."""
    holder: int | None = None
    """The process that holds the other end of the pipe, or the lock, that this one waits for."""
    switches: int = 0
    """Voluntary context switches of the thread. The number does not change during one wait."""
    ticks: int = 0
    """Processor time of the thread, in clock ticks."""
    exit_code: int | None = None
    """Exit code of a zombie; negative for a signal."""
    dies_with_others: bool = False
    """True if torchrun has started it, and SIGTERM ends it. So it dies as soon as torchrun learns of a failed rank."""
    resident_bytes: int = 0
    limit_bytes: int | None = None
    """Limit of its control group; None: there is none."""
    free_bytes: int | None = None
    """Memory that its control group has left."""

    def number(self, variable: str) -> int | None:
        """Returns the value of a variable of its environment as a number; None if there is none."""
        text = (self.variables or {}).get(variable, "")
        return int(text) if text.isdecimal() and len(text) < 10 else None

    @property
    def waits_to_write(self) -> bool:
        """True if the thread writes to a full pipe, and waits for another process to read from it."""
        return self.holder is not None and self.file.startswith("pipe:") and self.system_call.startswith(_WRITES)

    def describe_wait(self) -> str:
        """Returns the thread's wait in the kernel as the end of a sentence; empty if unknown."""
        if self.waits_to_write:
            return f"waits in {self.system_call} of a full pipe, which process {self.holder} does not read"
        if self.holder is not None and self.file.startswith("pipe:"):
            return f"waits at a pipe whose other end process {self.holder} holds"
        if self.holder is not None:
            return f"waits for a lock on {self.file}, which process {self.holder} holds"
        if self.system_call in ("flock", "fcntl") and self.file:
            return f"waits for a lock on {self.file}"
        if self.system_call and self.file:
            where = f" on {self.mount}" if self.mount and self.state in DISK_SLEEP else ""
            return f"is in the system call {self.system_call} on {self.file}{where}"
        if self.state in DISK_SLEEP:
            what = f"{self.system_call}, " if self.system_call else ""
            return f"waits in the kernel ({what}{self.kernel_wait or 'function not known'})"
        return ""

    def describe_end(self) -> str:
        """Returns the end of a sentence about a process that has ended."""
        if self.state == NO_PROCESS:
            return "has no process any more"
        if self.exit_code is None:
            return "has ended, and its parent has not asked how"
        return told_of_exit(self.exit_code)


def told_of_exit(exit_code: int) -> str:
    """Returns the end of a sentence about a process that has ended; a negative code stands for a signal."""
    return f"has ended with exit code {exit_code}" if exit_code >= 0 else f"was killed by {signal_name(-exit_code)}"


def signal_name(number: int) -> str:
    """Returns the name of a signal, e.g. ``"SIGKILL"``."""
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")


def look_at(pid: int, thread: int | None = None) -> ProcessFacts:
    """Asks the operating system about a process. May block if the process hangs in the kernel.

    Args:
        pid: The process.
        thread: The kernel's id of the thread whose state, wait, switches and ticks are read; None: the main thread.
    """
    folder = _PROC / str(pid)
    stat = _bytes(folder / "stat")
    if not stat:
        return ProcessFacts(pid=pid, state=NO_PROCESS)
    # The process name, in parentheses, may contain any character.
    fields = stat.rpartition(b")")[2].split()
    state = fields[0].decode("ascii", errors="replace")
    facts = ProcessFacts(pid=pid, state=state, parent=int(fields[1]), user=_owner(folder))
    if state in GONE:
        status = int(fields[49]) if len(fields) > 49 else 0
        # The kernel hides the status from users who may not trace the process.
        code = None if not os.access(folder / "environ", os.R_OK) else os.waitstatus_to_exitcode(status)
        return replace(facts, exit_code=code)
    task = folder / "task" / str(thread or pid)
    call, file = _system_call(task)
    task_fields = _bytes(task / "stat").rpartition(b")")[2].split()
    memory = None
    with suppress(OSError, ValueError):
        memory = group_memory(pid)
    resident = _bytes(folder / "statm").split()
    return replace(
        facts,
        state=task_fields[0].decode("ascii", errors="replace") if task_fields else state,
        command=_command(folder),
        variables=_variables(folder),
        kernel_wait=_text(task / "wchan").strip("0"),
        system_call=call,
        file=file,
        mount=_mount_of(folder, file) if file.startswith("/") else "",
        holder=_holder(pid, call, file),
        switches=_number_of("voluntary_ctxt_switches", _text(task / "status")),
        ticks=sum(map(int, task_fields[11:13])) if len(task_fields) > 12 else 0,
        dies_with_others=_dies_of(signal.SIGTERM, _text(folder / "status"))
        and _TORCHRUN.search(_command(_PROC / fields[1].decode())) is not None,
        resident_bytes=int(resident[1]) * os.sysconf("SC_PAGE_SIZE") if len(resident) > 1 else 0,
        limit_bytes=None if memory is None else memory.total_bytes,
        free_bytes=None if memory is None else memory.free_bytes,
    )


def descendants_of(pid: int) -> list[int]:
    """Returns all descendants of a process, children before grandchildren."""
    families: dict[int, list[int]] = {}
    for child, parent in _parents():
        families.setdefault(parent, []).append(child)
    found, layer = list[int](), [pid]
    while layer:
        layer = [child for one in layer for child in families.get(one, ()) if child not in found]
        found += layer
    return found


def all_processes() -> list[int]:
    """Returns the ids of all processes that can be seen here."""
    return sorted(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())


def uses_torch(pid: int) -> bool:
    """Returns True if a process has torch's library in its memory."""
    return "/libtorch" in _text(_PROC / str(pid) / "maps")


def variables_of(pid: int) -> Mapping[str, str] | None:
    """Returns the variables of a process that tell about ranks; None if they may not be read."""
    return _variables(_PROC / str(pid))


def _parents() -> Iterator[tuple[int, int]]:
    for pid in all_processes():
        fields = _bytes(_PROC / str(pid) / "stat").rpartition(b")")[2].split()
        if len(fields) > 1:
            yield pid, int(fields[1])


def _bytes(path: Path) -> bytes:
    """Returns a file of ``/proc``; empty if it is gone, or not ours to read."""
    with suppress(OSError):
        return path.read_bytes()
    return b""


def _text(path: Path) -> str:
    return _bytes(path).decode(errors="replace").strip()


def _owner(folder: Path) -> int:
    with suppress(OSError):
        return folder.stat().st_uid
    return -1


def _command(folder: Path) -> str:
    return _bytes(folder / "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()[:_COMMAND_CHARACTERS]


def _dies_of(signum: int, status: str) -> bool:
    """Returns True if a signal ends a process at once, because the process does not catch, ignore or block it.

    Args:
        signum: A signal that ends a process by default.
        status: ``/proc/PID/status``.
    """
    masks = re.findall(r"^Sig(?:Blk|Ign|Cgt):\s*([0-9a-f]+)$", status, re.MULTILINE)
    return len(masks) == 3 and not any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)


def _number_of(name: str, status: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+)$", status, re.MULTILINE)
    return 0 if found is None else int(found[1])


def _variables(folder: Path) -> Mapping[str, str] | None:
    try:
        entries = (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries)
    return {name: value[:_COMMAND_CHARACTERS] for name, _, value in pairs if name in _RANK_VARIABLES}


def _system_call(folder: Path) -> tuple[str, str]:
    """Returns the name of a thread's system call, and the file that the call works on."""
    words = _text(folder / "syscall").split()
    if len(words) < 2 or not words[0].isdecimal():
        return "", ""
    name = _SYSTEM_CALLS.get(os.uname().machine, {}).get(int(words[0]), "")
    if name not in _OF_A_FILE:
        return name, ""
    with suppress(OSError, ValueError):
        return name, str((folder / "fd" / str(int(words[1], 16))).readlink())
    return name, ""


def _mount_of(folder: Path, file: str) -> str:
    """Returns the mount point of a file, with the type and the source of the file system."""
    best, found = "", ""
    for line in _text(folder / "mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        point, kinds = left.split()[4], right.split()
        if len(kinds) > 1 and Path(file).is_relative_to(point) and len(point) >= len(best):
            best, found = point, f"{point} ({kinds[0]} from {kinds[1]})"
    return found


def _holder(pid: int, call: str, file: str) -> int | None:
    if file.startswith("pipe:"):
        return next(_other_ends(pid, file, os.O_RDONLY if call.startswith(_WRITES) else os.O_WRONLY), None)
    return _lock_holder(pid, _locks()) if call in ("flock", "fcntl") else None


def _other_ends(pid: int, pipe: str, access: int) -> Iterator[int]:
    """Yields the other processes that have a pipe open with the given access, or for both reading and writing."""
    for other in all_processes():
        if other == pid:
            continue
        folder = _PROC / str(other)
        with suppress(OSError):
            for descriptor in (folder / "fd").iterdir():
                with suppress(OSError):
                    if str(descriptor.readlink()) != pipe:
                        continue
                    flags = re.search(r"^flags:\s*(\d+)$", _text(folder / "fdinfo" / descriptor.name), re.MULTILINE)
                    if flags is not None and int(flags[1], 8) & os.O_ACCMODE in (access, os.O_RDWR):
                        yield other
                        break


def _lock_holder(pid: int, lines: Sequence[str]) -> int | None:
    """Returns the holder of the lock that a process waits for, from the lines of ``/proc/locks``."""
    holders: dict[str, int] = {}
    for line in lines:
        if (found := _LOCK.match(line)) is None:
            continue
        number, waits, owner = found[1], found[2], int(found[3])
        if waits and owner == pid:
            return holders.get(number)
        if not waits:
            holders[number] = owner
    return None


def lock_holder() -> int:
    """Returns the holder of the file lock that this process waits for, by process id; 0 if it waits for none."""
    return _lock_holder(os.getpid(), _locks()) or 0


def _locks() -> list[str]:
    return _text(_PROC / "locks").splitlines()
