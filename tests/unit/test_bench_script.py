"""The benchmark of a plain script: its interval, and which figures miss their goals."""

from __future__ import annotations

import random

import pytest

from benchmarks.comms import EVERY, MIB, NOTHING, OURS
from benchmarks.script import UNLIMITED, median_with_bounds, rows_of


@pytest.mark.parametrize(("count", "place"), [(5, 1), (10, 2), (20, 6)])
def test_the_interval_of_a_median_is_two_of_the_values(count: int, place: int) -> None:
    values = [float(value) for value in range(1, count + 1)]
    random.Random(0).shuffle(values)
    found = median_with_bounds(values)
    assert found == {
        "step_ratio": (count + 1) / 2,
        "step_ratio_low": float(place),
        "step_ratio_high": float(count + 1 - place),
    }


def figures(**change: float) -> dict[str, dict[str, float]]:
    """Figures that meet every goal, but for those of ours that are given."""
    ours = {
        "growth_bytes": 500 * MIB,
        "warm_bytes": 400 * MIB,
        "late_bytes": 0,
        "named_late": 0,
        "predicted_bytes": 400 * MIB,
        "step_ratio": 1.0,
        "step_ratio_low": 0.9,
        "step_ratio_high": 1.1,
    }
    others = {NOTHING: 1000, EVERY: 2500, UNLIMITED: 1200}
    return {**{way: {"growth_bytes": mib * MIB} for way, mib in others.items()}, OURS: ours | change}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"late_bytes": 2 * MIB}, ["late bytes of communicators"]),
        ({"named_late": 1}, ["collectives that the late watch names"]),
        ({"predicted_bytes": 500 * MIB}, ["prediction off by"]),
        ({"growth_bytes": 600 * MIB}, ["growth in 4 steps, against nothing"]),
        ({"growth_bytes": 700 * MIB}, ["growth in 4 steps, against nothing", "the same, against every group"]),
        ({"step_ratio": 1.04}, ["step, against nothing, median of the blocks"]),
        ({"warm_bytes": 0}, ["prediction off by"]),
    ],
)
def test_a_figure_beyond_its_goal_is_missed_in_its_row(change: dict[str, float], missed: list[str]) -> None:
    rows = rows_of("EP2", figures(**change))
    assert [row.name.removeprefix("EP2: ") for row in rows if not row.goal.is_met_by(row.ratio or row.ours)] == missed
