"""Where a run that starts again goes on: its own newest complete checkpoint, and nobody else's."""

from __future__ import annotations

from pathlib import Path

from rl_safe_workers.config import RunConfig
from rl_safe_workers.driver.resume import newest_since
from tests.unit.test_manifest import saved, written


def _newest(root: Path, *, since: float) -> int | None:
    config = RunConfig()
    config.trainer.default_local_dir = str(root)
    point = newest_since(config, since)
    return None if point is None else point.manifest.step


def test_it_is_the_newest_that_is_complete(tmp_path: Path) -> None:
    saved(tmp_path, 1, at=2001.0)
    saved(tmp_path, 2, at=2002.0)
    written(tmp_path, 3)
    assert _newest(tmp_path, since=2000.0) == 2


def test_what_an_earlier_run_has_left_is_not_gone_on_from(tmp_path: Path) -> None:
    saved(tmp_path, 8, at=1000.0)
    assert _newest(tmp_path, since=2000.0) is None
    saved(tmp_path, 1, at=2001.0)
    assert _newest(tmp_path, since=2000.0) == 1


def test_without_a_folder_there_is_none(tmp_path: Path) -> None:
    assert _newest(tmp_path / "gone", since=0.0) is None
