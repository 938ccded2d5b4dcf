"""Where a run that starts again goes on: its own newest complete checkpoint, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.folders.manifest import last_serial
from rl_safe_workers.driver.resume import newest_since
from tests.unit.saves import saved, written

HOUR_S = 3600.0


def _newest(root: Path, *, since: int) -> int | None:
    point = newest_since(root, since)
    return None if point is None else point.manifest.step


def test_it_is_the_newest_that_is_complete(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    written(tmp_path, 3)
    assert _newest(tmp_path, since=0) == 2


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
def test_a_clock_that_jumps_does_not_hide_or_show_another_runs(jump_s: float, tmp_path: Path) -> None:
    saved(tmp_path, 8, at=10 * HOUR_S)
    start = last_serial(tmp_path)
    assert _newest(tmp_path, since=start) is None
    saved(tmp_path, 1, at=10 * HOUR_S + jump_s)
    assert _newest(tmp_path, since=start) == 1
    saved(tmp_path, 2, at=10 * HOUR_S)
    assert _newest(tmp_path, since=start) == 2


def test_without_a_folder_there_is_none(tmp_path: Path) -> None:
    assert last_serial(tmp_path / "gone") == 0
    assert _newest(tmp_path / "gone", since=0) is None
