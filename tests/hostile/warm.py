"""A process that has the heavy modules imported, and forks a child for each command: ``python -m tests.hostile.warm``.

The child is watched from outside: it is killed when it takes too long or too much memory, and that is reported, since
a limit that the child itself could run into might be taken for an error of the input.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.hostile.canary import Watch
from tests.hostile.case import Command, Site
from tests.hostile.child import run_child
from tests.hostile.entries import WARM

KILL_AFTER_S = 8.0
"""Seconds that a child gets, as `Outcome.seconds`; more than is judged, so that slow and blocked can be told apart."""
KILL_ABOVE_BYTES = 3 * 2**29
"""Memory beyond that of the warm process that a child and its children get; more than is judged."""
HARNESS_FAILED = 99
"""Exit code of a child in which the harness itself has failed."""
POLL_S = 0.02
OUTPUT_BYTES = 4 * 2**20
"""How much of a child's output is looked at."""
PR_SET_CHILD_SUBREAPER = 36


@dataclass(kw_only=True)
class Outcome:
    """How a command ended."""

    code: int | None = None
    """Its exit code; None if it did not come to its end."""
    died: str | None = None
    """``time``, ``memory`` or the name of a signal; None for one that ended by itself."""
    error: str | None = None
    """Class of the error that it reported."""
    seconds: float = 0.0
    """Wall-clock time, without that in which it was ready to run and a busy machine did not let it."""
    cpu_s: float = 0.0
    """Processor time, of its children too."""
    peak_bytes: int = 0
    """Largest resident memory of it and its children."""
    out: str = ""
    err: str = ""
    undecodable: bool = False
    """True if its output is not UTF-8."""
    ran: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    """Files of others that were read."""
    touched: list[str] = field(default_factory=list)
    """Files of others that were written, made, moved or removed."""
    changed: list[str] = field(default_factory=list)
    """State of the process that is not what it was."""
    left: int = 0
    """Processes that outlived it."""


def serve(group: str) -> None:
    """Answers requests, one JSON object a line, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints while it is imported is no answer
    for module in WARM[group]:
        importlib.import_module(module)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": group}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        command = Command(request["entry"], tuple(request["arguments"]))
        outcome = run(command, Site(Path(request["root"])))
        print(json.dumps(asdict(outcome)), file=answers, flush=True)


def run(command: Command, site: Site) -> Outcome:
    """Runs a command in a child."""
    watch = Watch(site.outside)
    out, err = site.root / ".stdout", site.root / ".stderr"
    reading, writing = os.pipe()
    started_s = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            run_child(command, site, report=writing, out=out, err=err)
        finally:
            os._exit(HARNESS_FAILED)  # whatever happens, no child goes on as a second server
    os.close(writing)
    died, sampled, waited_s = _attend(child, started_s)
    _, status, usage = os.wait4(child, 0)
    outcome = Outcome(
        died=died or (signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else None),
        seconds=time.monotonic() - started_s - waited_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=max(sampled, usage.ru_maxrss * 1024),
        left=_end_orphans(),
    )
    _add_report(outcome, reading)
    read, touched = watch.close()
    outcome.read = list(dict.fromkeys([*outcome.read, *read]))
    outcome.touched = list(dict.fromkeys([*outcome.touched, *touched]))
    assert os.waitstatus_to_exitcode(status) != HARNESS_FAILED, (
        f"a child of the harness has failed: {_read(err, outcome)}"
    )
    for name, path in (("out", out), ("err", err)):
        setattr(outcome, name, _read(path, outcome))
        path.unlink(missing_ok=True)
    return outcome


def _attend(child: int, started_s: float) -> tuple[str | None, int, float]:
    """Waits for a child, and kills it and its children if they take too much.

    Returns:
        Why they were killed, their peak memory in bytes, and the seconds in which a busy machine let them wait.
    """
    most = _resident_bytes(os.getpid()) + KILL_ABOVE_BYTES
    descriptor, peak, why = os.pidfd_open(child), 0, None
    waited: dict[int, float] = {}
    try:
        while not select.select([descriptor], [], [], POLL_S)[0]:
            family = [child, *_descendants(child)]
            peak = max(peak, sum(map(_resident_bytes, family)))
            waited |= {process: _waited_s(process) for process in family}
            seconds = time.monotonic() - started_s - sum(waited.values())
            if why is None and (peak > most or seconds > KILL_AFTER_S):
                why = "memory" if peak > most else "time"
                for process in reversed(family):
                    _kill(process)
    finally:
        os.close(descriptor)
    return why, peak, sum(waited.values())


def _add_report(outcome: Outcome, reading: int) -> None:
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    if data:
        report: dict[str, Any] = json.loads(data)
        for name, value in report.items():
            setattr(outcome, name, value)


def _read(path: Path, outcome: Outcome) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        data = file.read(OUTPUT_BYTES)
    try:
        return data.decode()
    except UnicodeDecodeError:
        outcome.undecodable = len(data) < OUTPUT_BYTES
        return data.decode(errors="replace")


def _descendants(process: int) -> Iterator[int]:
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from _descendants(child)


def _resident_bytes(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _waited_s(process: int) -> float:
    """Seconds for which a process was ready to run and waited for a processor."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _end_orphans() -> int:
    """Kills what a child has left behind, which has become this process's own; returns how many there were."""
    orphans = list(_descendants(os.getpid()))
    for process in orphans:
        _kill(process)
    with suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            pass
    return len(orphans)


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1])
