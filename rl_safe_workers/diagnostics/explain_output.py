"""Writes an explanation: as lines, as JSON, as a trace for ui.perfetto.dev, and as a page with a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_safe_workers.diagnostics.explanation import Explanation
from rl_safe_workers.foreign_files import printable
from rl_safe_workers.output_files import render, write_output

_LINE_CHARACTERS = 2000


def lines(explanation: Explanation) -> Iterator[str]:
    """Yields the lines for a terminal: the root cause, what to do, then each rank."""
    yield _line(explanation.verdict)
    yield _line(f"to do: {explanation.advice}")
    for row in explanation.rows:
        yield _line(f"{'*' if row.is_culprit else ' '} {' '.join(filter(None, (row.when, row.who, row.what)))}")
        if row.source:
            yield _line(f"    {row.source}: {row.evidence}")
    for note in explanation.notes:
        yield _line(note)


def _line(text: str) -> str:
    return printable(text)[:_LINE_CHARACTERS]


def write_json(explanation: Explanation, path: Path) -> None:
    """Writes everything but the collectives.

    Raises:
        ConfigError: If the file cannot be written.
    """
    write_output(path, json.dumps(explanation.as_dict(), indent=1) + "\n", option="--json")


def write_trace(explanation: Explanation, path: Path) -> None:
    """Writes the collectives of a Flight Recorder as Chrome's trace events: a track for each rank.

    Raises:
        ConfigError: If the file cannot be written.
    """
    tracks = {name: number for number, name in enumerate(sorted({one.track for one in explanation.slices}))}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}}
        for name, number in tracks.items()
    ]
    last_s = max((one.end_s or one.start_s for one in explanation.slices), default=0.0)
    for one in explanation.slices:
        # A collective that has not ended is drawn up to the latest time in any record.
        end_s = last_s if one.end_s is None else one.end_s
        events.append(
            {
                "name": one.name,
                "ph": "X",
                "pid": 0,
                "tid": tracks[one.track],
                "ts": one.start_s * 1e6,
                "dur": max(1.0, (end_s - one.start_s) * 1e6),
                "args": dict(one.details),
            }
        )
    trace = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    write_output(path, trace + "\n", option="--trace")


def write_html(explanation: Explanation, path: Path) -> None:
    """Writes a page with a table. It needs no network and no script.

    Raises:
        ConfigError: If the file cannot be written.
    """
    page = render("rl_safe_workers.diagnostics", "explanation.html.j2", explanation=explanation)
    write_output(path, page, option="--html")
