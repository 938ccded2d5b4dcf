"""Work on many files at the same time."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier

import pytest

from rl_safe_workers.checkpoint.folders.many_files import at_once

PATIENCE_S = 60


def test_calls_run_at_the_same_time_and_their_results_are_in_order() -> None:
    meeting = Barrier(4)

    def work(number: int) -> int:
        meeting.wait(PATIENCE_S)
        return 10 * number

    assert at_once(work, range(4)) == [0, 10, 20, 30]


def test_an_error_is_raised_once_all_calls_have_ended(tmp_path: Path) -> None:
    meeting, ended = Barrier(3), list[int]()

    def work(number: int) -> None:
        meeting.wait(PATIENCE_S)
        if number == 1:
            (tmp_path / "missing").unlink()
        ended.append(number)

    with pytest.raises(FileNotFoundError, match="missing"):
        at_once(work, range(3))
    assert sorted(ended) == [0, 2]


def test_nothing_to_do_is_nothing() -> None:
    assert at_once(len, []) == []
