"""Reads untrusted Flight Recorder files, and finds from them the rank that the others waited for.

A child with limits of memory and time reads each file as data. torch's own analyser is not used, because it unpickles
such a file without a check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_safe_workers.bounded_child import Limits, call_bounded
from rl_safe_workers.diagnostics.flight_recorder import Record, Work, works_of
from rl_safe_workers.errors import RunError
from rl_safe_workers.foreign_files import printable, read_foreign
from rl_safe_workers.ranks import format_ranks

FLIGHT_ADVICE = "look at the stack and the log of the rank that did not come; the table has its last collective"
_FILE_BYTES, _ANSWER_BYTES = 2**28, 2**26
_LIMITS = Limits(memory_bytes=2**30, cpu_s=30, wall_s=60.0, answer_bytes=_ANSWER_BYTES)
_MOST_WORKS, _NAME_CHARACTERS = 20_000, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """The Flight Recorder's file of one rank.

    Example: ``Flight(global_rank=1, works=[...], sizes=["[[2]]"], groups={"0": [0, 1]})``
    """

    global_rank: int
    works: Sequence[Work]
    """Oldest first."""
    sizes: Sequence[str]
    """The shapes of each work's inputs."""
    groups: Mapping[str, Sequence[int]]
    """Global ranks of each group, by torch's name of it, as far as the file tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """The ranks that the others waited for, by their files.

    Example: ``Lag(verdict="rank 1 did not come to all_reduce of WORLD", culprits=[1], ranks={1: "..."})``
    """

    verdict: str
    culprits: Sequence[int]
    """Empty if nobody can be named."""
    ranks: Mapping[int, str]
    """The end of a sentence about each rank."""


def read_flight_file(path: Path, *, global_rank: int) -> Flight:
    """Reads a file of torch's Flight Recorder, a pickle or JSON.

    Raises:
        RunError: If it cannot be read as data within the limits; the message names it.
    """
    answer = call_bounded(
        flight_as_json, {"path": str(path.absolute())}, limits=_LIMITS, subject=str(path), failure=RunError
    )
    found = json.loads(answer)
    return Flight(
        global_rank=global_rank,
        works=[Work(**work) for work in found["works"]],
        sizes=found["sizes"],
        groups=found["groups"],
    )


def flight_as_json(path: str) -> bytes:
    """Reads a file in a bounded child; returns its works, their shapes and the groups as JSON."""
    contents = read_foreign(Path(path), limit_bytes=_FILE_BYTES)
    record, works = works_of(contents)
    pairs = sorted(zip(works, record["entries"], strict=True), key=lambda pair: pair[0].created_s)[-_MOST_WORKS:]
    groups = {
        _text(name): list(map(int, re.findall(r"\d+", str(config.get("ranks", "")))))[:_MOST_WORKS]
        for name, config in dict(record.get("pg_config", {})).items()
    }
    found: dict[str, Any] = {
        "works": [
            {
                "op": _text(work.op),
                "group": _text(work.group),
                "group_name": _text(work.group_name),
                "number": int(work.number),
                "has_ended": bool(work.has_ended),
                "created_s": float(work.created_s),
            }
            for work, _ in pairs
        ],
        "sizes": [_text(entry.get("input_sizes", "")) for _, entry in pairs],
        "groups": groups,
    }
    return json.dumps(found).encode()


def _text(value: object) -> str:
    return printable(str(value))[:_NAME_CHARACTERS]


def lagging(flights: Sequence[Flight], *, unread: frozenset[int] = frozenset()) -> Lag | None:
    """Finds the ranks that did not come to a collective in which others wait; None if nobody waits.

    Args:
        flights: The files of the ranks, one or more of each.
        unread: Ranks with a file that is not among ``flights``.
    """
    records = {rank: Record.of(works) for rank, works in _by_rank(flights).items()}
    waiting = {rank: record.under_way for rank, record in records.items() if record.under_way is not None}
    if not waiting:
        return None
    ranks = {rank: _state(record) for rank, record in records.items()}
    if (mismatch := _mismatch(flights, waiting)) is not None:
        said, few = mismatch
        return Lag(verdict=said, culprits=few, ranks=ranks)
    behind, absent, unclear = set[int](), set[int](), set[int]()
    for work in waiting.values():
        for rank in _members(work, flights, records, unread):
            if rank in records and records[rank].begun.get(work.group_key, 0) >= work.number:
                continue
            (unclear if rank in unread else behind if rank in records else absent).add(rank)
    culprits = sorted(behind - waiting.keys())
    first = min(waiting.values(), key=lambda work: work.created_s)
    held = f"rank {format_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} in {first}"
    if culprits and not absent and not unclear:
        verdict = f"rank {format_ranks(culprits)} did not come: {held} (number {first.number})"
        return Lag(verdict=verdict, culprits=culprits, ranks=ranks)
    why = (
        f"rank {format_ranks(absent)} has left no Flight Recorder file"
        if absent
        else f"a Flight Recorder file of rank {format_ranks(unclear)} was not read"
        if unclear
        else "every rank waits in a collective by its file"
    )
    return Lag(verdict=f"not known, because {why}; {held} (number {first.number})", culprits=(), ranks=ranks)


def _by_rank(flights: Sequence[Flight]) -> dict[int, list[Work]]:
    found: dict[int, list[Work]] = {}
    for flight in flights:
        found.setdefault(flight.global_rank, []).extend(flight.works)
    return {rank: sorted(works, key=lambda work: work.created_s) for rank, works in sorted(found.items())}


def _members(work: Work, flights: Sequence[Flight], records: Mapping[int, Record], unread: frozenset[int]) -> set[int]:
    """Returns the global ranks of a work's group. For the default group, these are all ranks that have a file."""
    named = {rank for flight in flights for rank in flight.groups.get(work.group_key, ())}
    if work.group in ("default_pg", "0", "WORLD", ""):
        named |= records.keys() | unread | {rank for flight in flights for rank in flight.groups.get("", ())}
    return named or {rank for rank, record in records.items() if work.group_key in record.begun}


def _mismatch(flights: Sequence[Flight], waiting: Mapping[int, Work]) -> tuple[str, list[int]] | None:
    """Finds ranks that wait in other collectives, or with other shapes, at the same place of one group."""
    sizes = {
        (flight.global_rank, work): size
        for flight in flights
        for work, size in zip(flight.works, flight.sizes, strict=True)
    }
    spots: dict[tuple[str, int], dict[tuple[str, str], list[int]]] = {}
    descriptions: dict[str, str] = {}
    for rank, work in waiting.items():
        kind = work.op, sizes.get((rank, work), "") if "all_reduce" in work.op else ""
        spots.setdefault((work.group_key, work.number), {}).setdefault(kind, []).append(rank)
        descriptions[work.group_key] = work.group
    for (group, number), kinds in spots.items():
        if len(kinds) > 1:
            said = "; ".join(
                f"rank {format_ranks(ranks)} is in {op} {size}".strip() for (op, size), ranks in kinds.items()
            )
            by_size = sorted(kinds.values(), key=len)
            few = by_size[0] if len(by_size[0]) < len(by_size[1]) else list[int]()
            return f"ranks are in different collectives, number {number} of {descriptions[group]}: {said}", few
    return None


def _state(record: Record) -> str:
    if record.under_way is not None:
        return f"waits in {record.under_way} (number {record.under_way.number})"
    return "is in no collective" + (
        "" if record.last is None else f"; the last was {record.last} ({record.last.number})"
    )
