"""What torch's Flight Recorder has of each training rank's collectives. torch itself is not needed to read it."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_safe_workers import env
from rl_safe_workers.driver.actors import GLOO_FLIGHTS

logger = logging.getLogger(__name__)


class _PlainUnpickler(pickle.Unpickler):
    """Reads lists, dictionaries, numbers and text; the Flight Recorder's files hold nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a Flight Recorder file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A collective in the record of a rank."""

    op: str
    group: str
    number: int
    """Of the group's collectives, counted by each member."""
    has_ended: bool
    """In a result or an error."""
    created_s: float
    """Unix time in seconds."""

    def __str__(self) -> str:
        return f"{self.op} of {self.group}"


def read_flights(target: Path) -> dict[int, list[Work]]:
    """What the files in a folder have, by training rank, oldest first."""
    records: dict[int, list[Work]] = {}
    for file in (file for prefix in (GLOO_FLIGHTS, env.NCCL_FLIGHTS) for file in target.glob(f"{prefix}*")):
        try:
            with file.open("rb") as opened:
                works = _works(_PlainUnpickler(opened).load()["entries"])
            records.setdefault(int(file.name.rpartition("_")[2]), []).extend(works)
        except Exception as error:  # whatever torch has made of it: the rest of the evidence counts more
            logger.warning("%s cannot be read: %s: %s", file, type(error).__name__, error)
    return {rank: sorted(works, key=lambda work: work.created_s) for rank, works in sorted(records.items())}


def _works(entries: Sequence[Mapping[str, Any]]) -> list[Work]:
    """The works of one file. A group's end in their order, though of a batch NCCL's record ends the last part alone."""
    found: list[Work] = []
    ended: set[Any] = set()
    for entry in reversed(entries):
        group = tuple(entry["process_group"])
        work = _work(entry)
        found.append(replace(work, has_ended=work.has_ended or group in ended))
        if work.has_ended:
            ended.add(group)
    return found[::-1]


def _work(entry: Mapping[str, Any]) -> Work:
    name, description = entry["process_group"]
    return Work(
        op=entry["profiling_name"].rpartition(":")[2],
        group=description if description not in ("", "undefined") else name,
        number=entry["collective_seq_id"],
        has_ended=entry["retired"] or entry["state"] == "completed",
        created_s=entry["time_created_ns"] / 1e9,
    )


def works_waited_in(records: Mapping[int, Sequence[Work]], missing: Collection[int]) -> dict[int, Work]:
    """Finds the collective that each training rank waits in, or waited in until it gave up.

    Args:
        records: What each rank has begun, oldest first.
        missing: Ranks that the others wait for.

    Returns:
        By rank, where there is one: the oldest that has not ended; else the last, if no missing rank has begun it.
    """
    found = {}
    behind = [records[rank] for rank in missing if rank in records]
    for rank, works in records.items():
        if under_way := [work for work in works if not work.has_ended]:
            found[rank] = under_way[0]
        elif works and behind and rank not in missing:
            last = works[-1]
            begun = [work.number for theirs in behind for work in theirs if work.group == last.group]
            if last.number > max(begun, default=0):
                found[rank] = last
    return found


def waiting_ranks(works: Mapping[int, Work]) -> set[int]:
    """Training ranks that have a collective under way: they have come, and wait in it for others."""
    return {rank for rank, work in works.items() if not work.has_ended}
