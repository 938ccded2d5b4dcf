"""The judge of first lines, by lines that are right, leave something out, or blame somebody else."""

from __future__ import annotations

import pytest

from tests.diagnosis.cells import ROWS, SAMPLE, Cell, Host, Score, all_cells, score
from tests.diagnosis.host import Fault

HANG = Cell(18, Host.VERL, Fault("train", "hang"))
KILL = Cell(12, Host.SWIFT, Fault("save", "kill", rank=0))
AT = "tests/diagnosis/misdeeds.py:52 (hang)"


@pytest.mark.parametrize(
    ("cell", "line", "wanted"),
    [
        (HANG, f"hang: phase train, training world: 0 arrived, 1 did not; training rank 1 is at {AT}", Score.RIGHT),
        (
            HANG,
            "hang: phase train, training world: 0 arrived, 1 did not; training rank 1 is at x.py:1 (f)",
            Score.INCOMPLETE,
        ),
        (HANG, f"hang: phase save, training world: 0 arrived, 1 did not; training rank 1 is at {AT}", Score.INCOMPLETE),
        (HANG, f"hang: phase train, training world: 1 arrived, 0 did not; training rank 0 is at {AT}", Score.WRONG),
        (HANG, "", Score.INCOMPLETE),
        (HANG, f"hang: phase train, w: 2 arrived, 0-1 did not within 9 s; training rank 1 is at {AT}", Score.WRONG),
        (KILL, "training rank 1 died in phase save; training rank 0 was in all_gather of X", Score.WRONG),
        (KILL, "training rank 0 on 10.0.0.4 died in phase save, last seen at x.py:1 (f)", Score.RIGHT),
        (KILL, "training rank 1 failed in phase save at x.py:1 (f): ConnectionError: reset by peer", Score.WRONG),
        (KILL, "training rank 0 failed in phase save at x.py:1 (f): ConnectionError: reset by peer", Score.INCOMPLETE),
    ],
)
def test_a_line_is_worth_what_it_says(cell: Cell, line: str, wanted: Score) -> None:
    assert score(cell, line) is wanted


def test_every_host_of_every_row_has_a_fault_or_a_reason() -> None:
    for row in ROWS.values():
        assert {*row.faults, *row.absent} == set(Host)
        assert not {*row.faults} & {*row.absent}
    assert len(ROWS) == 25
    assert sum(len(row.absent) for row in ROWS.values()) <= 40


def test_the_sample_is_of_cells_and_has_ten_at_least() -> None:
    cells = {(cell.row, cell.host) for cell in all_cells()}
    assert cells >= SAMPLE
    assert len(SAMPLE) >= 10
