"""Writes a plan as JSON, piece by piece, because at 131,072 ranks the members alone are millions of numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from rl_safe_workers.findings import Finding
from rl_safe_workers.plan.memory_plan import WAYS, Span
from rl_safe_workers.plan.plan import Communicator, Plan
from rl_safe_workers.plan.saves import SaveWay

FORMAT = 1


def write_json(plan: Plan, findings: Sequence[Finding], stream: TextIO) -> None:
    """Writes a plan and its hazards as one JSON object, with ``communicators`` last."""
    head = json.dumps(summary(plan, findings), indent=1)
    stream.write(head.removesuffix("\n}"))
    stream.write(',\n "communicators": [')
    for index, communicator in enumerate(plan.communicators):
        stream.write("," * bool(index) + "\n  " + json.dumps(_communicator(plan, communicator)))
    stream.write("\n ]\n}\n")


def summary(plan: Plan, findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the plan and its hazards as a dictionary, without the communicators."""
    request = plan.request
    facts = asdict(request)
    facts.pop("source")
    layout = facts.pop("layout")
    return {
        "format": FORMAT,
        "source": request.source.name,
        "facts": facts,
        "layout": layout | {"data": request.layout.data, "expert_data": request.layout.expert_data},
        "nodes": [
            {"node": node, **{str(role): [ranks.start, ranks.stop - 1] for role, ranks in roles.items()}}
            for node, roles in plan.roles_by_node()
        ],
        "memory_bytes": {way: _span(plan.memory.total(way)) for way in WAYS}
        | {"late in the first step, at first use": _span(plan.memory.late())},
        "model": None if plan.model is None else {"parameters": plan.model.total, "layers_by_stage": plan.layers},
        "saves": [_save(way) for way in plan.saves],
        "hazards": [finding.as_dict() for finding in findings],
    }


def _span(span: Span) -> dict[str, int]:
    return asdict(span)


def _save(way: SaveWay) -> dict[str, Any]:
    return {
        "sharding": way.sharding,
        "fully_parallel": way.fully_parallel,
        "raises": not way.bytes_by_rank,
        "total_bytes": way.total,
        "most_bytes": way.most,
        "writers": way.writers,
        "seconds": round(way.seconds, 3),
        "bytes_by_rank": list(_runs(way.bytes_by_rank)),
    }


def _runs(values: Sequence[int]) -> Iterator[list[int]]:
    """Yields ``[first rank, last rank, bytes]`` for each run of consecutive ranks that write equally many bytes."""
    first = 0
    for rank in range(1, len(values) + 1):
        if rank == len(values) or values[rank] != values[first]:
            yield [first, rank - 1, values[first]]
            first = rank


def _communicator(plan: Plan, communicator: Communicator) -> dict[str, Any]:
    family = communicator.family
    taken = {group.description: group.by_way for group in plan.memory.groups}.get(family.description)
    return {
        "group": family.description,
        "key": communicator.key,
        "backend": family.backend,
        "size": family.size,
        "count": family.count,
        "classes": list(communicator.classes),
        "first_phase": communicator.first_phase,
        "crosses_nodes": communicator.crossing,
        "bytes": None if taken is None else {way: _span(span) for way, span in taken.items()},
        "members": list(family.all_ranks()),
    }
