"""Writes an examination as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

from rich.table import Table

from rl_safe_workers.findings import print_findings
from rl_safe_workers.plain_console import PlainConsole

if TYPE_CHECKING:
    from rl_safe_workers.doctor.examine import Examination

FORMAT = 1
_NARROW = 132


def print_examination(examination: Examination) -> None:
    """Prints to stdout the facts, then the cost of each group of a live bootstrap, then the findings."""
    console = PlainConsole()
    # A pipe has no width. Tables of the default 80 columns would break every line.
    console.width = max(console.width, _NARROW) if not console.is_terminal else console.width
    console.print(_facts(examination))
    if examination.live is not None and examination.live.ledgers:
        from rl_safe_workers.driver.outputs.ledger import ledger_table

        console.print()
        console.print(ledger_table(examination.live.ledgers[0]))
    console.print()
    print_findings(console, examination.findings)


def _facts(examination: Examination) -> Table:
    table = Table("what", "found", title="Facts", title_justify="left")
    table.columns[0].no_wrap = True
    for fact in examination.facts:
        table.add_row(fact.name, fact.value)
    return table


def write_json(examination: Examination, stream: TextIO) -> None:
    """Writes an examination as one JSON object."""
    found = {
        "format": FORMAT,
        "stops": examination.stops,
        "facts": [asdict(fact) for fact in examination.facts],
        "findings": [finding.as_dict() for finding in examination.findings],
        "live": None if examination.live is None else examination.live.as_list(),
    }
    stream.write(json.dumps(found, indent=1) + "\n")
