"""Classifies lines of foreign logs. No other module reads such lines for causes. It does not decide who is to blame.

A line gives a `Fault`, and serves as its evidence, word for word. `foreign_errors` classifies the messages of torch,
NCCL and Ray.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from rl_safe_workers.diagnostics.proc_facts import signal_name
from rl_safe_workers.foreign_errors import ForeignCause, classify


class Fault(StrEnum):
    """The kind of failure that a log line shows."""

    OOM_KILL = "OOM kill"
    RAY_MEMORY = "Ray's memory monitor"
    NODE_LOST = "node lost"
    XID = "GPU fault (Xid)"
    SIGNAL = "signal"
    DEVICE_MEMORY = "GPU out of memory"
    HOST_MEMORY = "host out of memory"
    DEVICE_ERROR = "CUDA error"
    SHARED_MEMORY = "/dev/shm is full"
    NO_SPACE = "full disk"
    IMPORT = "import error"
    SHAPES = "different shapes"
    RAISED = "exception"
    TIME_LIMIT = "time limit of the job"
    NCCL = "NCCL error"
    SILENT_END = "process ended without a word"
    ABORTED = "abort"
    EXIT = "exit code"
    ASLEEP = "uninterruptible sleep"
    DEADLINE = "deadline of ours"
    TIMEOUT = "timeout"
    PEER_LOST = "lost peer"
    ASKED = "asked to end"

    @property
    def tier(self) -> int:
        """Returns 0 for a cause, 1 for a possible consequence of one, 2 for a wait in vain, 3 for a lost peer."""
        if self in (Fault.PEER_LOST, Fault.ASKED):
            return 3
        if self in (Fault.TIMEOUT, Fault.DEADLINE):
            return 2
        return int(self in (Fault.NCCL, Fault.SILENT_END, Fault.ABORTED, Fault.EXIT))


ADVICE: Mapping[Fault, str] = {
    Fault.OOM_KILL: "give the job more host memory, or let it take less: fewer workers, smaller staging buffers",
    Fault.RAY_MEMORY: "give the node more memory, or raise RAY_memory_usage_threshold",
    Fault.NODE_LOST: "look at that node: power, network, its kernel log",
    Fault.XID: "look the Xid up in NVIDIA's list, and take the GPU out of service if it comes again",
    Fault.SIGNAL: "SIGSEGV or SIGBUS: read the stack in its log; SIGKILL: check the kernel log and the scheduler",
    Fault.DEVICE_MEMORY: "take smaller batches, or offload; `rl-safe plan` shows what communicators take",
    Fault.HOST_MEMORY: "give the process more host memory",
    Fault.DEVICE_ERROR: "run again with CUDA_LAUNCH_BLOCKING=1 to see the kernel",
    Fault.SHARED_MEMORY: "make /dev/shm larger (--shm-size of a container), and remove what dead runs have left there",
    Fault.NO_SPACE: "free space on that file system",
    Fault.IMPORT: "install that module in the environment of the workers",
    Fault.SHAPES: "give the same shape on every rank there, e.g. pad the last batch or drop it (drop_last=True)",
    Fault.RAISED: "look at the line that raised it",
    Fault.TIME_LIMIT: "ask the scheduler for more time, and save before its limit",
    Fault.NCCL: "run again with NCCL_DEBUG=WARN, and look at the first warning",
    Fault.SILENT_END: "search the kernel log of that node (dmesg) for an OOM kill, and find out what sent SIGKILL",
    Fault.ABORTED: "look at the lines before it in its log",
    Fault.EXIT: "look at the end of that process's log",
    Fault.ASLEEP: "look at the storage or the device that it waits for: no signal ends such a process before that",
    Fault.DEADLINE: "look at the ranks that it names; `verdict.json` has their places",
    Fault.TIMEOUT: "look at the rank that did not come: its log, its stack, its Flight Recorder file",
    Fault.PEER_LOST: "look for the log of the process that was lost: it is not here",
    Fault.ASKED: "look for who asked: a scheduler, a launcher or a person",
}
_PATTERNS: tuple[tuple[Fault, re.Pattern[str]], ...] = tuple(
    (fault, re.compile(pattern))
    for fault, pattern in (
        (Fault.OOM_KILL, r"(Out of memory|Memory cgroup out of memory): Killed process (?P<pid>\d+)"),
        (Fault.OOM_KILL, r"slurmstepd: error: Detected \d+ oom[_-]kill event"),
        (Fault.OOM_KILL, r"\boom-kill:constraint=.*,pid=(?P<pid>\d+)"),
        (Fault.RAY_MEMORY, r"exit_type = NODE_OUT_OF_MEMORY"),
        (Fault.RAY_MEMORY, r"(killed|Killing worker).*due to the node running low on memory"),
        (Fault.NODE_LOST, r"death reason = UNEXPECTED_TERMINATION"),
        (Fault.NODE_LOST, r"CANCELLED AT \S+ DUE TO NODE FAILURE"),
        (Fault.TIME_LIMIT, r"CANCELLED AT \S+ DUE TO TIME LIMIT"),
        (Fault.XID, r"NVRM: Xid \(PCI:\S+\): (?P<detail>\d+)"),
        (Fault.SIGNAL, r"^\*\*\* (?P<detail>SIG(SEGV|BUS|FPE|ILL|ABRT)) received at time=(?P<unix>\d+)"),
        (Fault.SIGNAL, r"^Fatal Python error: (?P<detail>Segmentation fault|Bus error)"),
        (Fault.SIGNAL, r"^!+ (?P<detail>Segfault) encountered !+$"),  # tvm_ffi, which vLLM loads
        (Fault.SIGNAL, r"^\s*exitcode\s*: -\d+ \(pid: (?P<pid>\d+)\)\s+\((?P<detail>SIG\w+)\)"),
        (Fault.EXIT, r"^\s*exitcode\s*: (?P<detail>\d+) \(pid: (?P<pid>\d+)\)"),
        (Fault.SIGNAL, r"failed \(exitcode: -(?P<signal>\d+)\) local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\)"),
        (Fault.EXIT, r"failed \(exitcode: (?P<detail>\d+)\) local_rank: (?P<rank>\d+) \(pid: (?P<pid>\d+)\)"),
        (Fault.SHARED_MEMORY, r"It is possible that dataloader's workers are out of shared memory"),
        (Fault.SHARED_MEMORY, r"(unable to (write to file|allocate shared memory)|No space left on device).*/dev/shm"),
        (Fault.DEVICE_ERROR, r"CUDA error: (an illegal|device-side assert|misaligned|unspecified launch)"),
        (Fault.SILENT_END, r"^(\(raylet[^)]*\) )?A worker died or was killed while .* Worker PID: (?P<pid>\d+)"),
        (Fault.SILENT_END, r"Reporting worker exit, worker id = (?P<worker>\w+),.*exit_type = SYSTEM_ERROR"),
        (Fault.ABORTED, r"^Fatal Python error: (?P<detail>Aborted)"),
        (Fault.ABORTED, r"^terminate called (after throwing|without an active)"),
        (Fault.ASKED, r"Sending process (?P<pid>\d+) closing signal SIGTERM"),
    )
)
_OF_KERNEL: tuple[tuple[Fault, re.Pattern[str]], ...] = (
    (Fault.XID, re.compile(r"NVRM: Xid \(PCI:\S+\): (?P<detail>\d+), pid='?(?P<pid>\d+)")),
    (Fault.SIGNAL, re.compile(r"\[(?P<pid>\d+)\]: (?P<detail>segfault) at ")),
    (Fault.SIGNAL, re.compile(r"\[(?P<pid>\d+)\] (?P<detail>general protection fault|trap invalid opcode) ip:")),
)
"""Lines of the kernel's log. They may name any process of the machine, so they count only for a known process."""
_OF_RAY_EXIT: tuple[tuple[Fault, re.Pattern[str]], ...] = (
    (Fault.RAY_MEMORY, re.compile(r"due to the node running low on memory")),
    (Fault.ASKED, re.compile(r"The process receives a (?P<detail>SIGTERM)|exit_actor\(\) is called")),
    (Fault.ASKED, re.compile(r"it was killed by `ray\.kill`|all references to the actor were removed")),
    (Fault.EXIT, re.compile(r"Worker exits with an exit code (?P<detail>\d+)")),
    (Fault.NODE_LOST, re.compile(r"its node has died|node it was running on is dead")),
)
"""Ray's messages about a dead actor. Each was seen with Ray 2.60.0 when an actor ended in that way."""
OF_FOREIGN = {
    ForeignCause.TIMEOUT: Fault.TIMEOUT,
    ForeignCause.PEER_LOST: Fault.PEER_LOST,
    ForeignCause.STORE_LOST: Fault.PEER_LOST,
    ForeignCause.OUT_OF_MEMORY: Fault.DEVICE_MEMORY,
    ForeignCause.NO_SPACE: Fault.NO_SPACE,
    ForeignCause.IMPORT: Fault.IMPORT,
    ForeignCause.SHAPES: Fault.SHAPES,
}
_RAY_ERROR = re.compile(
    r"ray\.exceptions\.(Ray|Actor|Worker|Node|Owner|Object|Task|Local|Reference|GetTimeout|OutOf)\w*(Error|Crashed)\b"
)
_RELAYED = re.compile(
    r"(ChildFailedError|ProcessRaisedException|ProcessExitedException|BrokenProcessPool|EngineDeadError|BrokenPipeError"
    r"|ConnectionResetError|ConnectionRefusedError|ConnectionAbortedError|EOFError|CancelledError)\b"
    r"|.*Engine core initialization failed"
)
"""Exceptions of a process that only reports the failure of another one."""
_TYPES: tuple[tuple[re.Pattern[str], Fault], ...] = (
    (re.compile(r"ray\.exceptions\.OutOfMemoryError\b"), Fault.RAY_MEMORY),
    (re.compile(r"ray\.exceptions\.GetTimeoutError\b"), Fault.TIMEOUT),
    (re.compile(r"(ModuleNotFound|Import)Error\b"), Fault.IMPORT),
    (re.compile(r"(torch\.)?(cuda\.)?OutOfMemoryError\b"), Fault.DEVICE_MEMORY),
    (re.compile(r"MemoryError\b"), Fault.HOST_MEMORY),
    (re.compile(r"(KeyboardInterrupt|SystemExit)\b"), Fault.ASKED),
    (re.compile(r"(rl_safe_workers\.errors\.)?PhaseTimeoutError\b"), Fault.DEADLINE),
    (re.compile(r"(rl_safe_workers\.errors\.)(RankError|StoreLostError)\b"), Fault.PEER_LOST),
    (re.compile(r"(asyncio\.)?(exceptions\.)?TimeoutError\b"), Fault.TIMEOUT),
    (_RELAYED, Fault.PEER_LOST),
    (_RAY_ERROR, Fault.PEER_LOST),
)
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(\([A-Za-z_][\w.]*\))?)(: (?P<text>.*))?$")
_UNCAUGHT = re.compile(r"^\s*what\(\): +(.+)")
"""The message of an exception that has ended a C++ program, e.g. one from torch's NCCL watchdog."""
_TIMES = (
    re.compile(r"^\W?(?P<ymd>\d{4}-\d\d-\d\d)[ T_](?P<hms>\d\d:\d\d:\d\d)([.,](?P<part>\d{1,6}))?"),
    re.compile(r"^\s*time\s+: (?P<ymd>\d{4}-\d\d-\d\d)_(?P<hms>\d\d:\d\d:\d\d)"),
    re.compile(r"^\W?[IWEF](?P<md>\d{4}) (?P<hms>\d\d:\d\d:\d\d)\.(?P<part>\d{1,6})"),
)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_RAY_PREFIX = re.compile(r"^\((?P<name>[\w:.]+) pid=(?P<pid>\d+)(, ip=[\d.]+)?\) ?")
_RANK_PREFIX = re.compile(r"^\[(rank|default)(?P<rank>\d+)\]: ?")
_FILE_LINE = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$')
_REPORT = re.compile(
    r"^\s*(\[\d+\]:|(time|host|rank|exitcode|error_file|traceback|To enable traceback)\s|[=\-*]{8,}|Failures:"
    r"|Root Cause|<NO_OTHER_FAILURES>|\S+ FAILED$)|torch/distributed/elastic/"
    r"|^(ERR|Extension modules|Aborted|terminate called)|^$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a log, without colours and prefixes.

    Example: ``Line(text="ValueError: no", who="rank 1")``
    """

    text: str
    who: str
    """The rank or process that its prefix names; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFault:
    """A failure that one line tells of.

    Example: ``LineFault(fault=Fault.SIGNAL, detail="SIGKILL", pid=4711)``
    """

    fault: Fault
    detail: str = ""
    pid: int | None = None
    rank: int | None = None
    worker: str = ""
    """Ray's id of the worker."""
    unix_s: float | None = None


def stripped(text: str) -> Line:
    """Returns a line without colours and the prefixes of Ray and torchrun, which name the process."""
    text = _COLOUR.sub("", text)
    if (found := _RAY_PREFIX.match(text)) is not None:
        return Line(text=text[found.end() :], who=f"{found['name']} (process {found['pid']})")
    if (found := _RANK_PREFIX.match(text)) is not None:
        return Line(text=text[found.end() :], who=f"rank {found['rank']}")
    return Line(text=text, who="")


def fault_of_line(text: str) -> LineFault | None:
    """Returns the failure that a line outside a traceback tells of; None if it tells of none."""
    for fault, pattern in _PATTERNS:
        if (found := pattern.search(text)) is not None:
            return _fault(fault, found.groupdict())
    if (uncaught := _UNCAUGHT.match(text)) is not None and (
        fault := fault_of_exception(f"RuntimeError: {uncaught[1]}")
    ) != Fault.RAISED:
        return LineFault(fault=fault)
    return None


def fault_of_kernel_line(text: str) -> LineFault | None:
    """Returns the failure that a line of the kernel's log tells of. The process may belong to another run."""
    for fault, pattern in _OF_KERNEL:
        if (found := pattern.search(text)) is not None:
            return _fault(fault, found.groupdict())
    return fault_of_line(text)


def fault_of_ray_exit(text: str) -> LineFault | None:
    """Returns the failure that Ray reports for a dead actor; None if Ray only reports that the actor is gone."""
    for fault, pattern in _OF_RAY_EXIT:
        if (found := pattern.search(text)) is not None:
            return _fault(fault, found.groupdict())
    return None


def _fault(fault: Fault, groups: Mapping[str, str | None]) -> LineFault:
    number = {name: int(value) for name in ("pid", "rank", "signal", "unix") if (value := groups.get(name))}
    detail = signal_name(number["signal"]) if "signal" in number else groups.get("detail") or ""
    if fault is Fault.SIGNAL:
        fault = {"SIGTERM": Fault.ASKED, "SIGINT": Fault.ASKED, "SIGABRT": Fault.ABORTED}.get(detail, fault)
    return LineFault(
        fault=fault,
        detail=detail,
        pid=number.get("pid"),
        rank=number.get("rank"),
        worker=groups.get("worker") or "",
        unix_s=number.get("unix"),
    )


def fault_of_exception(text: str) -> Fault:
    """Returns the kind of the failure that the last line of a traceback tells of, ``"Type: message"``."""
    for pattern, fault in _TYPES:
        if pattern.match(text):
            return fault
    if (line := fault_of_line(text)) is not None:
        return line.fault
    foreign = classify(text.partition(": ")[2] or text)
    if foreign is not ForeignCause.UNKNOWN:
        return OF_FOREIGN[foreign]
    return Fault.NCCL if "NCCL error" in text or "DistBackendError" in text else Fault.RAISED


def exception_line(text: str) -> str | None:
    """Returns the type of an exception if a line may end a traceback; else None."""
    found = _EXCEPTION.match(text)
    return None if found is None else found["type"]


def frame_line(text: str) -> tuple[str, int, str] | None:
    """Returns file, line and function of a line of a traceback; None for any other line."""
    found = _FILE_LINE.match(text)
    return None if found is None else (found["file"], int(found["line"]), found["function"])


def is_report(text: str) -> bool:
    """Returns True if a line belongs to what launchers print once a process has failed."""
    return _REPORT.search(text) is not None


def time_of(text: str, year: int) -> float | None:
    """Returns the Unix time that a line begins with, in the machine's time zone; None if it has none."""
    for pattern in _TIMES:
        if (found := pattern.match(text)) is not None:
            groups = found.groupdict()
            day = groups.get("ymd") or f"{year}-{groups['md'][:2]}-{groups['md'][2:]}"
            try:
                moment = datetime.fromisoformat(f"{day}T{groups['hms']}")
            except ValueError:
                return None
            return moment.timestamp() + float(f"0.{groups.get('part') or 0}")
    return None


def pids_in_name(name: str) -> Iterator[int]:
    """Yields the process id in the name of one of Ray's log files, e.g. 4711 in ``worker-<id>-ffffffff-4711.err``."""
    if (found := re.fullmatch(r"worker-\w+-\w+-(\d{1,9})\.(out|err)", name)) is not None:
        yield int(found[1])
