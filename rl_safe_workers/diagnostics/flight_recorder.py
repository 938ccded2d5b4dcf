"""Reads each training rank's collectives from torch's Flight Recorder. Needs no torch."""

from __future__ import annotations

import io
import json
import logging
import math
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

logger = logging.getLogger(__name__)

_RECENT = 16
"""Works that a summary of a record keeps."""
_SHOWN = 3
"""Most tensors of a work whose shapes are told."""


class _PlainUnpickler(pickle.Unpickler):
    """Reads lists, dictionaries, numbers and text; the Flight Recorder's files hold nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a Flight Recorder file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A collective in the record of a rank."""

    op: str
    group: str
    """The group's description, or torch's name of it if it has none. Several groups may have one description."""
    number: int
    """Number among the group's collectives, counted by each member."""
    has_ended: bool
    """In a result or an error."""
    created_s: float
    """Unix time in seconds."""
    group_name: str = ""
    """torch's own name of the group: the same on all of its members, and no other group's. Empty if not known."""
    backend: str = ""
    """``"gloo"`` or ``"nccl"``; empty if it is not known."""
    tensors: str = ""
    """Shapes and types of what this rank gives, e.g. ``"32x128 Float"``; empty if nothing."""
    elements: int = 0
    """Number of elements that this rank gives."""

    @property
    def group_key(self) -> str:
        """The text that tells the group from all others: torch's name, or the description if no name is known."""
        return self.group_name or self.group

    def __str__(self) -> str:
        return f"{self.op} of {self.group}" if self.group else self.op


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A rank's collectives: the one that it is in, and the last ones of each group."""

    under_way: Work | None
    """The oldest that has not ended."""
    last: Work | None
    begun: Mapping[str, int]
    """The number of the last one of each group, by `Work.group_key`."""
    recent: Sequence[Work] = ()
    """The last ones, oldest first."""

    @classmethod
    def of(cls, works: Sequence[Work]) -> Self:
        """Sums up works, oldest first."""
        begun: dict[str, int] = {}
        for work in works:
            begun[work.group_key] = max(work.number, begun.get(work.group_key, 0))
        under_way = next((work for work in works if not work.has_ended), None)
        return cls(under_way=under_way, last=works[-1] if works else None, begun=begun, recent=works[-_RECENT:])


def read_flights(files: Mapping[str, bytes]) -> dict[int, Record]:
    """Reads files of the Flight Recorder, by training rank.

    Args:
        files: Their contents, by names that end in the rank. An unreadable file causes a warning.
    """
    found: dict[int, list[Work]] = {}
    for name, contents in files.items():
        try:
            _, works = works_of(contents)
            found.setdefault(int(name.rpartition("_")[2]), []).extend(works)
        except Exception as error:  # whatever torch has made of it: the rest of the evidence counts more
            logger.warning("%s cannot be read: %s: %s", name, type(error).__name__, error)
    return {rank: Record.of(sorted(works, key=lambda work: work.created_s)) for rank, works in sorted(found.items())}


def works_of(contents: bytes) -> tuple[Mapping[str, Any], list[Work]]:
    """Reads a file of the Flight Recorder, a pickle of plain values or JSON.

    Returns:
        The whole record, and the works of its ``entries``, in their order.

    Raises:
        Exception: Of any class, if the record does not have torch's format.
    """
    is_json = contents.lstrip()[:1] == b"{"
    record = json.loads(contents) if is_json else _PlainUnpickler(io.BytesIO(contents)).load()
    return record, _works(record["entries"])


def _works(entries: Sequence[Mapping[str, Any]]) -> list[Work]:
    """Returns the works of one file. A group ends them in order; NCCL records only the end of a batch's last part."""
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
    backend, _, op = entry["profiling_name"].rpartition(":")
    sizes, types = entry.get("input_sizes", ()), entry.get("input_dtypes", ())
    given = [f"{'x'.join(map(str, size)) or 'scalar'} {kind}" for size, kind in zip(sizes, types, strict=False)]
    return Work(
        op=op,
        group=description if description not in ("", "undefined") else name,
        number=entry["collective_seq_id"],
        has_ended=entry["retired"] or entry["state"] == "completed",
        created_s=entry["time_created_ns"] / 1e9,
        group_name=str(name),
        backend=backend,
        tensors=", ".join(given[:_SHOWN]) + (f" and {len(given) - _SHOWN} more" if len(given) > _SHOWN else ""),
        elements=sum(math.prod(size) for size in sizes),
    )


def works_waited_in(records: Mapping[int, Record], missing: Collection[int]) -> dict[int, Work]:
    """Finds the collective that each training rank waits in, or waited in until it gave up.

    Args:
        records: The record of each rank.
        missing: Ranks that the others wait for.

    Returns:
        The collective by rank, if there is one: the oldest that has not ended. If all have ended, the last one, unless
        a missing rank has begun it, too.
    """
    found = {}
    behind = [records[rank].begun for rank in missing if rank in records]
    begun: dict[str, int] = {}
    for theirs in behind:
        for group, number in theirs.items():
            begun[group] = max(number, begun.get(group, 0))
    for rank, record in records.items():
        if record.under_way is not None:
            found[rank] = record.under_way
        elif (
            (last := record.last) is not None
            and behind
            and rank not in missing
            and last.number > begun.get(last.group_key, 0)
        ):
            found[rank] = last
    return found
