"""Measures the cost of signatures: runs the control plane's operations, signed and unsigned in turns.

All ranks run in one thread, and the benchmark measures that thread's processor time, the only cost of a signature. A
figure is the time of one rank for one operation, as the mean over all ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

from torch.distributed import TCPStore

from benchmarks.table import Row, at_most, machine_in_words
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.control.seal import Seal, new_secret
from rl_safe_workers.ranks import trainer_ids
from rl_safe_workers.versions import installed_versions

RANKS, ROUNDS, CALLS = 3, 20, 50
DEAREST_US = 100
"""Largest cost of signatures for a rank in one operation, in microseconds."""
_PATIENCE = timedelta(seconds=60)
_REPORT = "x" * 500

Call = Callable[[list[ControlPlane], Deadline], object]


class Unsigned(Seal):
    """Signs nothing, and accepts every message."""

    def sign(self, key: str, contents: bytes) -> bytes:
        """Returns a constant instead of a signature, with the usual length."""
        return b"0" * 64

    def is_signed(self, key: str, contents: bytes, signature: bytes) -> bool:
        """Accepts any signature."""
        return True


def _barrier(planes: list[ControlPlane], deadline: Deadline) -> None:
    operations = [plane.begin("barrier", phase="train") for plane in planes]
    for operation in operations:
        if operation.arrive("all", range(RANKS)):
            operation.open("all")
    for operation in operations[:-1]:
        operation.is_open("all", deadline.remaining())
    for operation in operations:
        operation.forget_earlier()


def _decide(planes: list[ControlPlane], deadline: Deadline) -> None:
    gatherings = [plane.begin("decision", phase="save").gathering("vote") for plane in planes]
    for gathering in gatherings:
        gathering.report(_REPORT)
    gatherings[0].decide(deadline, len)
    for gathering in gatherings:
        gathering.await_decision(deadline)


OPERATIONS: dict[str, Call] = {"barrier": _barrier, "gather and decide": _decide}


def measure(report: Callable[[str], None]) -> list[Row]:
    """Times each operation among `RANKS` ranks.

    Args:
        report: Takes a line of progress for each operation.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    signed, unsigned = (_planes(store, name) for name in ("signed", "unsigned"))
    for plane in unsigned:
        plane._board._seal = Unsigned(bytes(32))
    rows: list[Row] = []
    for name, call in OPERATIONS.items():
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(2 * ROUNDS):
            is_signed = number % 4 in (0, 3)  # so that neither kind is always first
            times[is_signed].append(_microseconds(signed if is_signed else unsigned, call))
        ours, peer = median(times[True]), median(times[False])
        report(f"{name}: {json.dumps({'signed_us': round(ours, 1), 'unsigned_us': round(peer, 1)})}")
        rows.append(
            Row(
                name=f"{name}: extra processor time with signatures",
                unit="us",
                ours=ours - peer,
                goal=at_most(DEAREST_US),
                runs=ROUNDS,
                machine=machine_in_words(),
                versions=installed_versions(),
            )
        )
    return rows


def _planes(store: TCPStore, world: str) -> list[ControlPlane]:
    secret = new_secret()
    return [
        ControlPlane(store, world=world, rank=rank, members=trainer_ids(range(RANKS)), secret=secret)
        for rank in range(RANKS)
    ]


def _microseconds(planes: list[ControlPlane], call: Call) -> float:
    """Returns a rank's time for one call, in microseconds: the mean of `CALLS` and of all ranks."""
    deadline = Deadline.after(_PATIENCE)
    started_s = time.thread_time()
    for _ in range(CALLS):
        call(planes, deadline)
    return (time.thread_time() - started_s) / CALLS / RANKS * 1e6
