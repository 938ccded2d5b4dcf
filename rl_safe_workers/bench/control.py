"""What a signature costs: operations of the control plane, signed and unsigned, by turns in one run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median

from torch.distributed import TCPStore

from rl_safe_workers.bench.table import Row, at_most, machine_in_words
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.control.seal import Seal, new_secret
from rl_safe_workers.versions import installed_versions

RANKS, ROUNDS, CALLS = 2, 7, 300
DEAREST_US = 100
"""What a signature may cost an operation, in microseconds."""
_PATIENCE = timedelta(seconds=60)
_REPORT = "x" * 500

Call = Callable[[ControlPlane], object]


class Unsigned(Seal):
    """Signs nothing and takes everything."""

    def sign(self, key: str, contents: bytes) -> bytes:
        """Returns no signature, of the usual length."""
        return b"0" * 64

    def is_signed(self, key: str, contents: bytes, signature: bytes) -> bool:
        """Takes whatever is there."""
        return True


def _barrier(plane: ControlPlane) -> None:
    plane.barrier("train", Deadline.after(_PATIENCE))


def _decide(plane: ControlPlane) -> None:
    plane.decide("bench", phase="save", deadline=Deadline.after(_PATIENCE), report=_REPORT, decide=len)


def _verdicts(plane: ControlPlane) -> None:
    plane.exchange_verdicts(None, phase="teardown", deadline=Deadline.after(_PATIENCE))


OPERATIONS: dict[str, Call] = {"barrier": _barrier, "gather and decide": _decide, "verdicts": _verdicts}


def measure(report: Callable[[str], None]) -> list[Row]:
    """Times each operation among `RANKS` ranks, threads of this process.

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
            is_signed = number % 4 in (0, 3)  # so that neither is always the first
            times[is_signed].append(_microseconds(signed if is_signed else unsigned, call))
        ours, peer = median(times[True]), median(times[False])
        report(f"{name}: {json.dumps({'signed_us': round(ours, 1), 'unsigned_us': round(peer, 1)})}")
        rows.append(
            Row(
                name=f"{name}, signed, dearer by", unit="us", ours=ours - peer, goal=at_most(DEAREST_US), runs=ROUNDS,
                machine=machine_in_words(), versions=installed_versions(),
            )
        )  # fmt: skip
    return rows


def _planes(store: TCPStore, world: str) -> list[ControlPlane]:
    secret = new_secret()
    return [ControlPlane(store, world=world, rank=rank, size=RANKS, secret=secret) for rank in range(RANKS)]


def _microseconds(planes: list[ControlPlane], call: Call) -> float:
    """Returns the time of one call, in microseconds: of `CALLS` by all ranks at once."""

    def repeat(plane: ControlPlane) -> None:
        for _ in range(CALLS):
            call(plane)

    threads = [threading.Thread(target=repeat, args=(plane,), daemon=True) for plane in planes[1:]]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    repeat(planes[0])
    for thread in threads:
        thread.join()
    return (time.perf_counter() - started_s) / CALLS * 1e6
