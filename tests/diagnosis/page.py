"""The results of the cells as ``docs/diagnosis.md``."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from tests.diagnosis.cells import ROWS, Cell, Host, Score, all_cells, score
from tests.diagnosis.host import ALLOWED_S, ROOT, TIMEOUT_S, Fault

PAGE = ROOT / "docs" / "diagnosis.md"
NAMES = {
    Host.BUILTIN: "built-in driver",
    Host.SCRIPT: "script under torchrun",
    Host.VERL: "verl",
    Host.NEMO_RL: "NeMo RL's worker groups",
    Host.SWIFT: "ms-swift under torchrun",
}
ACTS = {
    "hang": "sleeps for ever",
    "raise": "raises",
    "kill": "gets SIGKILL",
    "stop": "gets SIGSTOP",
    "exit": "ends with exit code 3",
    "crash": "gets SIGSEGV",
    "storage": "waits in uninterruptible sleep",
}
HEAD = """# Diagnosis

This page shows whether the first line of a failed run names the root cause. A cell is one whole run on CPU: one kind of
report that users make, under one host, produced by one typical fault. `scripts/test --diagnosis` runs every cell
without a result and writes this page; `--anew` runs all. CI runs a sample.

A cell is right if the first line that our package prints names the rank, the phase, and what happened there: for a rank
that waits or raises, its line of code. A deadline is {timeout:.0f} s where the fault lets others wait; generation under
verl has 40 s. The run must end {allowed:.0f} s after that at the latest. Cells give the seconds from the fault to the
end.

The engines of verl and NeMo RL are doubles without a model, and NeMo RL's workers need no Megatron-Bridge.

verl goes on after an engine's error, without that answer. Its line is then the one that the driver logs, and the
seconds are those to the end of training.
"""


def write(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the page.

    Args:
        found: What each cell has shown, by its name.
    """
    cells = {str(cell): cell for cell in all_cells()}
    scores = {name: score(cells[name], str(seen["first_line"])) for name, seen in found.items() if name in cells}
    lines = [
        *(_filled(part) for part in HEAD.format(timeout=TIMEOUT_S, allowed=ALLOWED_S).split("\n\n")),
        _sums(cells.values(), scores),
        "",
        *_table(cells, found, scores),
        "",
        "## What stands for each report",
        "",
        *(f"- **{number}, {row.report}**: {_faults(row.faults)}" for number, row in ROWS.items() if row.faults),
        "",
        "## Cells without a fault",
        "",
        *(
            f"- **{number}, {ROWS[number].report}**, {', '.join(NAMES[host] for host in of)}: {why}."
            for number, why, of in _absences()
        ),
        "",
        "## First lines",
        "",
        *(line for name, cell in cells.items() if name in found for line in _shown(cell, found[name], scores[name])),
        _wrap(f"Machine: {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}."),
    ]
    PAGE.write_text("\n".join(line if line.startswith(("|", "    ")) else _wrap(line) for line in lines) + "\n")


def _sums(cells: Iterable[Cell], scores: Mapping[str, Score]) -> str:
    cells = list(cells)
    counts = {each: sum(one is each for one in scores.values()) for each in Score}
    return (
        f"{counts[Score.RIGHT]} of {len(scores)} cells are right, {counts[Score.INCOMPLETE]} leave something out, and "
        f"{counts[Score.WRONG]} blame another rank. {len(cells) - len(scores)} of {len(cells)} cells have not been run."
    )


def _table(
    cells: Mapping[str, Cell], found: Mapping[str, Mapping[str, Any]], scores: Mapping[str, Score]
) -> Iterable[str]:
    yield f"| | report | {' | '.join(NAMES[host] for host in Host)} |"
    yield f"|---:|---{'|---:' * len(Host)}|"
    for number, row in ROWS.items():
        entries = []
        for host in Host:
            name = f"{number:02d}-{host}"
            if name not in cells:
                entries.append("-")
            elif name not in scores:
                entries.append("not run")
            else:
                mark = "" if scores[name] is Score.RIGHT else f" **{scores[name]}**"
                entries.append(f"{found[name]['after_s']:.1f} s{mark}")
        yield f"| {number} | {row.report} | {' | '.join(entries)} |"


def _faults(faults: Mapping[Host, Fault]) -> str:
    by_fault: dict[str, list[str]] = {}
    for host, fault in faults.items():
        detail = f" ({fault.detail})" if fault.detail else ""
        text = f"{fault.who} {ACTS[fault.act]}{detail} in phase {fault.phase}"
        by_fault.setdefault(text, []).append(NAMES[host])
    if len(by_fault) == 1:
        return f"{next(iter(by_fault))}."
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in by_fault.items()) + "."


def _absences() -> Iterable[tuple[int, str, list[Host]]]:
    for number, row in ROWS.items():
        reasons: dict[str, list[Host]] = {}
        for host, why in row.absent.items():
            reasons.setdefault(why, []).append(host)
        for why, hosts in reasons.items():
            yield number, why, hosts


def _shown(cell: Cell, seen: Mapping[str, Any], found: Score) -> Iterable[str]:
    mark = "" if found is Score.RIGHT else f" ({found})"
    yield f"{cell.row}, {NAMES[cell.host]}{mark}:"
    yield ""
    text = str(seen["first_line"]) or "nothing"
    yield from (f"    {line}" for line in textwrap.wrap(text, 115, break_long_words=False, break_on_hyphens=False))
    yield ""


def _filled(paragraph: str) -> str:
    """Returns a paragraph with its lines broken anew, and an empty line after it."""
    return textwrap.fill(" ".join(paragraph.split()), 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _wrap(paragraph: str) -> str:
    if len(paragraph) <= 120:
        return paragraph
    indent = "  " if paragraph.startswith("- ") else ""
    lines = paragraph.splitlines()
    if len(lines) > 1:
        return paragraph
    return textwrap.fill(paragraph, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
