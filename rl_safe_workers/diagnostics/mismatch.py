"""Finds the rank that came to a collective of gloo with an odd tensor shape, from the Flight Recorder's records.

gloo aborts a process that receives more bytes than it expects. Either this process or the sender may have the wrong
tensor, so the abort does not tell which rank is wrong. The shapes decide: the majority of ranks counts as right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rl_safe_workers.diagnostics.flight_recorder import Record, Work
from rl_safe_workers.ranks import name_ranks, trainer_ids

_GLOO = "gloo"
_SAME_EVERYWHERE = frozenset({"all_reduce", "all_gather", "broadcast", "reduce", "gather", "reduce_scatter"})
"""gloo's collectives in which all ranks give, or take, tensors of one size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Ranks that came to one collective with different shapes.

    Example: ``Mismatch(work=work, culprits=frozenset({1}), said="training rank 1 gives 5000 Float, ...")``
    """

    work: Work | None
    """The collective; None if no record shows it."""
    culprits: frozenset[int]
    """Training ranks whose shape differs from the majority's; empty if there is no majority."""
    said: str
    """The shapes, as the end of a sentence about the collective. If no rank is named, also the reason."""


def find_mismatch(
    records: Mapping[int, Record], *, ended: Collection[int], aborted_in: str, is_sure: bool = False
) -> Mismatch | None:
    """Finds the collective in which shapes differ; None if nothing shows that they do.

    Args:
        records: The records of the ranks that are left, by training rank.
        ended: Training ranks that have died, at least one. They have left no record.
        aborted_in: The torch collective in which a library's thread has aborted one of them; empty if unknown.
        is_sure: True if gloo has reported that it ended them because of their shapes.
    """
    alive = {rank: record for rank, record in records.items() if rank not in ended}
    newest = [work for record in alive.values() if (work := record.under_way or record.last) is not None]
    spots: dict[tuple[str, int, str], Work] = {}
    for work in sorted(newest, key=lambda work: work.created_s):
        spots.setdefault(_spot(work), work)
    for spot, work in spots.items():
        if work.backend != _GLOO or work.op not in _SAME_EVERYWHERE:
            continue
        there = {rank: one for rank, record in alive.items() for one in record.recent if _spot(one) == spot}
        if len({one.tensors for one in there.values()}) > 1:
            return _among_the_living(work, there, ended)
        if is_sure or aborted_in.startswith(work.op):
            return _of_the_ended(work, there, ended)
    if is_sure:
        return Mismatch(work=None, culprits=frozenset(), said=_without_records(ended))
    return None


def _spot(work: Work) -> tuple[str, int, str]:
    return work.group_name, work.number, work.op


def _among_the_living(work: Work, there: Mapping[int, Work], ended: Collection[int]) -> Mismatch:
    """Names the minority. A rank that was ended got more than it expected, so its tensor is not the largest."""
    by_shape: dict[str, list[int]] = {}
    for rank, one in there.items():
        by_shape.setdefault(one.tensors, []).append(rank)
    told = [f"{_names(ranks)} with {shape}" for shape, ranks in by_shape.items()]
    votes = {shape: len(ranks) for shape, ranks in by_shape.items()}
    if len(by_shape) == 2:
        votes[min(by_shape, key=lambda shape: there[by_shape[shape][0]].elements)] += len(ended)
    most = max(votes.values())
    usual = [shape for shape, count in votes.items() if count == most]
    few = [] if len(usual) > 1 else [rank for shape, ranks in by_shape.items() if shape not in usual for rank in ranks]
    why = [] if few else ["the wrong rank is not known, because as many ranks have one shape as another"]
    return Mismatch(work=work, culprits=frozenset(few), said="; ".join([*told, _ended_by_gloo(ended), *why]))


def _of_the_ended(work: Work, there: Mapping[int, Work], ended: Collection[int]) -> Mismatch:
    """Names the ranks that were ended, if the others agree: they expected less than the others gave."""
    shape = next(iter(there.values())).tensors
    few = frozenset(ended) if len(there) > 1 else frozenset[int]()
    told = [
        f"{_names(there)} with {shape}, and {_names(ended)} with less",
        _ended_by_gloo(ended),
        *([] if few else ["the wrong rank is not known, because only two ranks can be compared"]),
    ]
    return Mismatch(work=work, culprits=few, said="; ".join(told))


def _without_records(ended: Collection[int]) -> str:
    return f"{_ended_by_gloo(ended)}; the wrong rank is not known, because the Flight Recorder has no record of it"


def _ended_by_gloo(ended: Collection[int]) -> str:
    return f"gloo aborted {_names(ended)}, which received more bytes than expected"


def _names(ranks: Collection[int]) -> str:
    return name_ranks(trainer_ids(ranks))
