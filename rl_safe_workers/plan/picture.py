"""Draws the ranks, node by node. Choosing a group in the picture lights up its members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_safe_workers.errors import ConfigError
from rl_safe_workers.findings import Finding, counted, lines, verdict
from rl_safe_workers.output_files import render, write_output
from rl_safe_workers.plan import tables
from rl_safe_workers.plan.plan import Plan, is_spare
from rl_safe_workers.ranks import Role

MOST_RANKS = 16384
_PER_ROW = 8
_WIDTH = 1030
_GAP, _LABEL = 14, 16
_LIST_WIDTH, _LINE = 420, 20
_DIGIT = 0.7
"""Width of a digit with its spacing, relative to the font size, in the widest of the common fonts."""
_MARGIN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A process of the picture. Example: ``Cell(rank=0, role=Role.TRAINER, node=0, x=0, y=16, …)``."""

    rank: int
    role: Role
    node: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A node's label. Example: ``Block(node=3, x=0, y=12)``."""

    node: int
    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The positions of all parts of the picture, in pixels.

    Example: ``lay_out(plan).cells[0].rank``
    """

    cells: tuple[Cell, ...]
    blocks: tuple[Block, ...]
    width: float
    height: float
    side: float
    font: float
    """Font size; 0 if cells are too small for numbers."""


def lay_out(plan: Plan) -> Grid:
    """Places every process: nodes side by side, eight GPUs in a row.

    Raises:
        ConfigError: If there are more ranks than a picture can show.
    """
    request = plan.request
    processes = request.trainers + request.rollouts
    if processes > MOST_RANKS:
        raise ConfigError(
            f"a picture of {processes} ranks would be illegible: --svg and --html take at most {MOST_RANKS}; use --json"
        )
    side = _side(request.gpus, request.colocated)
    columns, lines = min(request.gpus_per_node, _PER_ROW), -(-min(request.gpus_per_node, request.gpus) // _PER_ROW)
    block_width, block_height = columns * side, lines * side + _LABEL
    across = max(1, min(request.nodes, int((_WIDTH + _GAP) // (block_width + _GAP))))
    corners = [
        (node % across * (block_width + _GAP), node // across * (block_height + _GAP)) for node in range(request.nodes)
    ]
    cells = tuple(_cells(plan, side, corners))
    return Grid(
        cells=cells,
        blocks=tuple(Block(node=node, x=x, y=y + _LABEL - 5) for node, (x, y) in enumerate(corners)),
        width=across * (block_width + _GAP) - _GAP,
        height=(-(-request.nodes // across)) * (block_height + _GAP) - _GAP,
        side=side,
        font=_font(side, len(str(processes - 1)), request.colocated),
    )


def _side(gpus: int, colocated: bool) -> float:
    """Returns the side of a GPU's square in pixels. It shrinks with the number of GPUs."""
    for most, side in ((16, 56), (64, 40), (128, 32), (1024, 25), (4096, 14)):
        if gpus <= most:
            return side * 1.4 if colocated and gpus <= 1024 else side
    return 8


def _font(side: float, digits: int, colocated: bool) -> float:
    """Returns the largest font size at which a number fits into a cell; 0 if it would be too small to read."""
    width, height = side - 2, (side - 2) / (2 if colocated else 1)
    size = min(15.0, height * 0.75, width / (_DIGIT * digits))
    return round(size, 1) if size >= 8 else 0


def _cells(plan: Plan, side: float, corners: Sequence[tuple[float, float]]) -> Iterator[Cell]:
    request = plan.request
    inner = side - 2
    height = inner / 2 if request.colocated else inner
    # The next GPU on each node for a trainer, and the next one for a rollout rank. If they share GPUs, both begin at 0.
    taken: dict[Role, Counter[int]] = {role: Counter() for role in Role}
    if not request.colocated:
        taken[Role.ROLLOUT] = taken[Role.TRAINER]
    for rank, node in enumerate(plan.nodes):
        is_rollout = rank >= request.trainers
        of_role = taken[Role.ROLLOUT if is_rollout else Role.TRAINER]
        place, of_role[node] = of_role[node], of_role[node] + 1
        x, y = corners[node]
        line, column = divmod(place, _PER_ROW)
        yield Cell(
            rank=rank,
            role=Role.ROLLOUT if is_rollout else Role.TRAINER,
            node=node,
            x=x + column * side + 1,
            y=y + _LABEL + line * side + 1 + (height if is_rollout and request.colocated else 0),
            width=inner,
            height=height,
        )


def choices(plan: Plan) -> list[dict[str, Any]]:
    """Returns the kinds of groups that a viewer can choose, used ones first, in the form for the picture's script."""
    ordered = sorted(plan.communicators, key=is_spare)
    return [
        {
            "name": communicator.family.description,
            "note": f"{communicator.family.count} of {communicator.family.size}",
            "origin": communicator.family.origin,
            "members": [[axis.size, axis.stride] for axis in communicator.family.members],
            "groups": [[axis.size, axis.stride] for axis in communicator.family.groups],
            "spare": is_spare(communicator),
        }
        for communicator in ordered
    ]


def write_svg(plan: Plan, path: Path) -> None:
    """Writes only the picture, with the list of groups beside it.

    Raises:
        ConfigError: If it cannot be written.
    """
    grid, listed = lay_out(plan), choices(plan)
    height = max(grid.height + 90, len(listed) * _LINE + 90)
    write_output(
        path,
        render(
            "rl_safe_workers.plan",
            "picture.svg.j2",
            plan=plan,
            grid=grid,
            choices=listed,
            headline=tables.headline(plan),
            title=_title(plan),
            width=grid.width + _LIST_WIDTH + 2 * _MARGIN,
            height=height + _MARGIN,
            left=_LIST_WIDTH + _MARGIN,
            margin=_MARGIN,
            line=_LINE,
        ),
        option="--svg",
    )


def write_html(plan: Plan, findings: Sequence[Finding], path: Path) -> None:
    """Writes a page with the picture, its groups, and every table as text. The page needs no network.

    Raises:
        ConfigError: If it cannot be written.
    """
    write_output(
        path,
        render(
            "rl_safe_workers.plan",
            "picture.html.j2",
            plan=plan,
            grid=lay_out(plan),
            choices=choices(plan),
            headline=tables.headline(plan),
            findings=[(finding, list(lines(finding))) for finding in findings],
            verdict=verdict(findings),
            title=_title(plan),
            nodes=list(tables.node_rows(plan)),
            communicator_headings=tables.COMMUNICATOR_HEADINGS,
            communicators=[
                (tables.communicator_row(plan, c), is_spare(c)) for c in sorted(plan.communicators, key=is_spare)
            ],
            memory=list(tables.memory_rows(plan)) if tables.takes_device_memory(plan) else [],
            save_headings=tables.SAVE_HEADINGS,
            saves=list(tables.save_rows(plan)),
        ),
        option="--html",
    )


def _title(plan: Plan) -> str:
    trainers, rollouts = plan.request.trainers, plan.request.rollouts
    return f"{counted(trainers, 'trainer')}, {counted(rollouts, 'rollout rank')}"
