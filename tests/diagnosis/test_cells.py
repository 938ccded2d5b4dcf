"""Each fault of the ground truth: the first line that a user reads names who it was, where, and what happened."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.diagnosis.cells import SAMPLE, Cell, Host, Score, all_cells, expected, score
from tests.diagnosis.conftest import SEEN, hosts, kept
from tests.diagnosis.host import ALLOWED_S, Seen, deadline_s

CELLS = [
    pytest.param(cell, id=str(cell), marks=() if (cell.row, cell.host) in SAMPLE else pytest.mark.every_cell)
    for cell in all_cells()
    if cell.host in hosts()
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", CELLS)
def test_the_first_line_says_who_where_and_what(
    cell: Cell, tmp_path: Path, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    whole, anew = (bool(request.config.getoption(option)) for option in ("--diagnosis", "--anew"))
    found = None if anew or not whole else kept().get(str(cell))
    if found is None:
        seen: Seen = importlib.import_module(f"tests.diagnosis.{cell.host}_host").run(cell.fault, tmp_path)
        shown = {
            "first_line": seen.first_line.replace(str(tmp_path), "FOLDER"),
            "advice": seen.advice,
            "after_s": seen.after_s,
        }
        record_property(SEEN, {"cell": str(cell), "seen": shown, "is_kept": whole})
        sys.stderr.write(f"\n{cell}: {seen.after_s:.1f} s: {seen.first_line or seen.output[-3000:]}\n")
    else:
        shown = found
    assert score(cell, shown["first_line"]) is Score.RIGHT, (shown["first_line"], expected(cell))
    assert shown["after_s"] <= deadline_s(cell.fault, is_verl=cell.host is Host.VERL) + ALLOWED_S
