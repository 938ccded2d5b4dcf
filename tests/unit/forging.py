"""Misdeeds of another process that writes to the keys of a control plane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import CommunicatorError, PhaseTimeoutError

SHORT_S = 0.6
ABSENT = 1
Call = Callable[[ControlPlane], Any]


def reach_barrier(plane: ControlPlane) -> str:
    plane.barrier("save", Deadline.after(SHORT_S))
    return "went on"


def reach_decision(plane: ControlPlane) -> Any:
    return plane.gathering("vote", phase="save").settle(Deadline.after(SHORT_S), report=plane.rank, decide=list)


def exchange_outcomes(plane: ControlPlane) -> Any:
    return plane.exchange_outcomes(None, phase="teardown", deadline=Deadline.after(SHORT_S))


OPERATIONS = {"barrier": reach_barrier, "decide": reach_decision, "verdicts": exchange_outcomes}


def read_key(store: Any, key: str) -> bytes:
    return bytes(store.compare_set(key, "nothing", "nothing"))


def overwrite(store: Any, keys: dict[str, bytes]) -> None:
    for key in keys:
        store.set(key, b"1")


def append(store: Any, keys: dict[str, bytes]) -> None:
    for key in keys:
        store.append(key, '\n0123[1, ""]')


def add_lines_of_the_others(store: Any, keys: dict[str, bytes]) -> None:
    """The lines of those who have come, with the rank of the one who has not."""
    for key, value in keys.items():
        if key.endswith("/came"):
            for line in value.split(b"\n")[1:]:
                store.append(key, b"\n" + line[:64] + b'[1, ""]')


def claim_the_place_of_the_absent(store: Any, keys: dict[str, bytes]) -> None:
    """Puts messages that one rank has signed under the keys of another."""
    for key, value in keys.items():
        place, _, rank = key.rpartition("/")
        if rank == "0":
            store.set(f"{place}/{ABSENT}", value)


def wake_everyone(store: Any, keys: dict[str, bytes]) -> None:
    for key in keys:
        for place in (key.rpartition("/")[0], key.rpartition("/")[0].rpartition("/")[0]):
            for name in ("open", "decision"):
                store.set(f"{place}/{name}", b"=[null, [0, 1, 2]]")


def replay(store: Any, keys: dict[str, bytes]) -> None:
    """All that was in the store during the operation before, under the keys of this one."""
    for key, value in keys.items():
        head, found, rest = key.partition("/1/")
        if found:
            store.set(f"{head}/2/{rest}", value)


MISDEEDS = {
    "overwrite": overwrite,
    "append": append,
    "lines of the others": add_lines_of_the_others,
    "their own reports": claim_the_place_of_the_absent,
    "wake everyone": wake_everyone,
    "replay": replay,
}


def is_listed(store: Any) -> dict[str, bytes]:
    return {key: read_key(store, key) for key in store.list_keys()}


def stranger(store: Any, misdeed: Callable[[Any, dict[str, bytes]], None], stop: threading.Event) -> None:
    """Does it again and again to all keys that there are or have ever been."""
    seen: dict[str, bytes] = {}
    while not stop.is_set():
        seen |= is_listed(store)
        misdeed(store, seen)
        time.sleep(0.01)


def names_a_key(error: Exception) -> bool:
    return isinstance(error, CommunicatorError | PhaseTimeoutError) and "of the run's store" in str(error)
