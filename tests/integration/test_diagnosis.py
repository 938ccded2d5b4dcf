"""The rank to blame among four plain processes: no Ray, no driver and no trainer of ours can be imported there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
RANK = "tests/integration/plain_rank.py"
SOURCE = (REPOSITORY / RANK).read_text(encoding="utf-8").splitlines()
SLEEPS_AT = f"{RANK}:{next(n for n, line in enumerate(SOURCE, 1) if 'where a sleeping' in line)} (sleep)"
FAILS_AT = f"{RANK}:{next(n for n, line in enumerate(SOURCE, 1) if 'where a raising' in line)} (fail)"
SAYS = {
    "killed": f"was killed by SIGKILL, last seen at {SLEEPS_AT}",
    "stopped": f"is stopped at {SLEEPS_AT}",  # as py-spy has found it
    "raises": f"failed in phase train at {FAILS_AT}: ValueError: no such expert",
    "sleeps": f"is at {SLEEPS_AT}",
}


def diagnosed(fates: list[str], folder: Path, *options: str, patience_s: float = 120.0) -> dict[str, Any]:
    """Runs the host; its ranks wait for each other for ``patience_s`` seconds."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.integration.plain_host", ",".join(fates), str(patience_s), str(folder), *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(("rank", "fate"), [(1, "killed"), (2, "stopped"), (3, "raises"), (0, "sleeps")])
def test_the_rank_that_the_others_wait_for_is_named_with_its_line(rank: int, fate: str, tmp_path: Path) -> None:
    fates = ["waits"] * 4
    fates[rank] = fate
    found = diagnosed(fates, tmp_path)
    assert found["culprits"] == [rank]
    assert f"training rank {rank} {SAYS[fate]}" in found["verdict"]
    for other in set(range(4)) - {rank}:
        assert re.fullmatch(rf"waits for other ranks at {RANK}:\d+ \(main\)", found["ranks"][other]), found["ranks"][
            other
        ]
    kept = {path.name for path in (tmp_path / "hang").iterdir()}
    assert {"verdict.json", "stack_trainer_0.txt"} <= kept


@pytest.mark.parametrize("fate", ["killed", "stopped"])
def test_the_owner_of_the_store_is_named_too(fate: str, tmp_path: Path) -> None:
    found = diagnosed([fate, "waits", "waits", "waits"], tmp_path, "serves")
    assert found["culprits"] == [0]
    assert f"training rank 0 {SAYS[fate]}" in found["verdict"]


def test_four_ranks_that_each_fail_in_their_own_way_are_all_named(tmp_path: Path) -> None:
    fates = ["killed", "stopped", "raises", "sleeps"]
    found = diagnosed(fates, tmp_path)
    assert found["ranks"] == [SAYS[fate] for fate in fates]
    assert found["culprits"] == [0]  # nothing but a death explains all the others


def test_ranks_that_have_given_up_and_ended_are_not_blamed(tmp_path: Path) -> None:
    found = diagnosed(["waits", "waits", "sleeps", "waits"], tmp_path, patience_s=3.0)
    assert found["culprits"] == [2]
    assert found["verdict"].startswith("hang: phase train, training world: 0-1, 3 arrived, 2 did not within 3.")
    assert f"training rank 2 is at {SLEEPS_AT}" in found["verdict"]
