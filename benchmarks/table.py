"""The result of a benchmark: rows with goals, printed as a table or written as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

ALL_GOALS_MET, A_GOAL_MISSED = 0, 3
"""Exit codes."""


class Relation(StrEnum):
    """How a figure relates to the bound of its goal."""

    AT_MOST = "<="
    AT_LEAST = ">="


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A promise. Example: ``Goal(relation=Relation.AT_MOST, bound=75)`` prints as ``<= 75``."""

    relation: Relation
    bound: float

    def is_met_by(self, value: float) -> bool:
        """Returns True if the value keeps the promise. NaN never does."""
        return value <= self.bound if self.relation is Relation.AT_MOST else value >= self.bound

    def __str__(self) -> str:
        return f"{self.relation} {self.bound:g}"


def at_most(bound: float) -> Goal:
    """Returns the promise not to exceed a bound."""
    return Goal(relation=Relation.AT_MOST, bound=bound)


def at_least(bound: float) -> Goal:
    """Returns the promise to reach a bound."""
    return Goal(relation=Relation.AT_LEAST, bound=bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure.

    Example: ``Row(name="wall", unit="s", ours=47.1, goal=Goal(relation=Relation.AT_MOST, bound=75), runs=3,
    machine="2 cores, ...", versions={"torch": "2.13.0"})``
    """

    name: str
    unit: str
    """Unit of the figure; empty for a plain number."""
    ours: float
    peer: float | None = None
    """The same figure for the peer; None if there is no peer."""
    goal: Goal
    """The goal for ``ratio``; without a peer, for ``ours``."""
    runs: int
    """Number of our runs behind the figure. The peer has as many."""
    machine: str
    versions: Mapping[str, str]

    @property
    def ratio(self) -> float | None:
        """``ours`` over ``peer``; None without a peer."""
        return None if self.peer is None else self.ours / self.peer

    @property
    def met(self) -> bool:
        """True if the goal is met."""
        return self.goal.is_met_by(self.ours if self.ratio is None else self.ratio)

    def to_json(self) -> dict[str, Any]:
        """Returns the row as JSON types."""
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "peer": self.peer,
            "ratio": self.ratio,
            "goal": str(self.goal),
            "met": self.met,
            "runs": self.runs,
            "machine": self.machine,
            "versions": dict(self.versions),
        }


def exit_code(rows: Sequence[Row]) -> int:
    """Returns 0 if every goal is met, else 3."""
    return ALL_GOALS_MET if all(row.met for row in rows) else A_GOAL_MISSED


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Writes all rows as a JSON list."""
    path.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n", encoding="utf-8")


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Prints one line per row, then each different combination of machine and versions."""
    table = Table(highlight=False)
    for heading in ("name", "unit"):
        table.add_column(heading)
    for heading in ("ours", "peer", "ratio", "goal", "met", "runs"):
        table.add_column(heading, justify="right")
    for row in rows:
        met = Text("yes", style="green") if row.met else Text("no", style="bold red")
        figures = (_figure(row.ours), _figure(row.peer), _figure(row.ratio))
        table.add_row(Text(row.name), Text(row.unit), *figures, str(row.goal), met, str(row.runs))
    console.print(table)
    for place in dict.fromkeys(f"{row.machine}; {_versions(row)}" for row in rows):
        console.print(place, style="dim", soft_wrap=True, highlight=False)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _versions(row: Row) -> str:
    return ", ".join(f"{name} {version}" for name, version in row.versions.items())


def machine_in_words() -> str:
    """Describes this machine, e.g. ``2 cores, 24 GiB, Debian GNU/Linux 12 (bookworm), Python 3.11.2``."""
    cores = len(os.sched_getaffinity(0))
    memory_gib = psutil.virtual_memory().total / 2**30
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        system = platform.system()
    plural = "" if cores == 1 else "s"
    return f"{cores} core{plural}, {memory_gib:.0f} GiB, {system}, Python {platform.python_version()}"
