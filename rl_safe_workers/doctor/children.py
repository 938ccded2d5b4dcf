"""Checks that a process spawned by multiprocessing can import this package.

megatron-core spawns such a process while it saves. The process starts a new Python, imports the main module again, then
imports its work. If a script has no guard, the process runs the script again and hangs.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from rl_safe_workers.doctor.check import Check, Fact, Report, Subject
from rl_safe_workers.findings import Finding, Severity

DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """The answer of a spawned process.

    Example: ``Child(here="/src/rl_safe_workers", there="/src/rl_safe_workers", main="rl-safe", seconds=0.4)``
    """

    here: str
    """Folder from which this process has imported the package."""
    there: str | None
    """Folder from which the spawned process has imported it; None if it did not answer."""
    main: str
    """The main module, which the spawned process imports again."""
    seconds: float
    code: int | None = 0
    """The exit code of the spawned process; None if it had not ended by the deadline."""


def _place() -> str:
    import rl_safe_workers

    return str(Path(rl_safe_workers.__file__).parent)


def _answer(connection: Connection) -> None:
    connection.send(_place())
    connection.close()


def spawn() -> Child:
    """Spawns a process, asks it where it has the package from, and ends it at the deadline at the latest."""
    started_s = time.monotonic()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=(sender,), daemon=True)
    process.start()
    sender.close()
    there = None
    if receiver.poll(DEADLINE_S):
        try:
            there = str(receiver.recv())
        except EOFError:  # it has died without an answer; its exit code says why
            there = None
    process.join(max(0.0, DEADLINE_S - (time.monotonic() - started_s)))
    code = process.exitcode
    process.kill()
    process.join()
    receiver.close()
    seconds = time.monotonic() - started_s
    main = getattr(sys.modules["__main__"], "__file__", None) or "no file"
    return Child(here=_place(), there=there, main=str(main), seconds=seconds, code=code)


def judge(child: Child, subject: Subject) -> Report:
    """Judges the child's answer, or its silence."""
    if child.there is None:
        how = "did not end" if child.code is None else f"ended with code {child.code}"
        return Report(
            facts=(Fact(name="spawned process", value=f"{how}, and could not import this package"),),
            findings=(_cannot_import(child, how),),
        )
    again = Fact(
        name="spawned process",
        value=f"imports {child.there} in {child.seconds:.2f} s; it imports the main module again, which a script of "
        "yours has to guard with if __name__ == '__main__'",
    )
    return Report(facts=(again,), findings=() if child.there == child.here else (_another(child),))


def _cannot_import(child: Child, how: str) -> Finding:
    return Finding(
        code="spawn-import",
        severity=Severity.STOPS,
        text=f"a spawned process {how} before it had imported this package: megatron-core spawns one for each save, "
        f"and it first imports the main module again ({child.main})",
        since="every Python",
        evidence=("CPython, multiprocessing, Safe importing of main module",),
        avoid="install the package where every process finds it, and guard a script with if __name__ == '__main__'",
    )


def _another(child: Child) -> Finding:
    return Finding(
        code="spawn-other-package",
        severity=Severity.RISKS,
        text=f"a spawned process imports {child.there}, this one {child.here}: a save runs other code than training",
        since="always",
        evidence=("CPython, multiprocessing, spawn",),
        avoid="one installation, and no PYTHONPATH that names another",
    )


CHILDREN = Check(name="spawned process", deadline_s=DEADLINE_S + 10, gather=lambda subject: spawn(), judge=judge)
