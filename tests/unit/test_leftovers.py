"""What a killed driver has left among the temporary files goes at the next start; what is in use stays."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from rl_safe_workers.env import RUN_ID
from rl_safe_workers.reaping.processes import RUN_FILE, TEMP_PREFIX, process_namespace, remove_leftovers

ME = psutil.Process()
HERE = process_namespace()


def folder(temp: Path, content: str) -> Path:
    path = temp / f"{TEMP_PREFIX}{uuid.uuid4().hex[:8]}"
    (path / "session_latest").mkdir(parents=True)
    (path / RUN_FILE).write_text(content)
    return path


def test_a_folder_of_which_nobody_lives_goes(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = folder(tmp_path, f"feedbeef {gone.pid} 1.0 {HERE}")
    remove_leftovers(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize(
    "content", [f"feedbeef {ME.pid} {ME.create_time()} {HERE}", "", "feedbeef 12"], ids=["starts", "empty", "cut_off"]
)
def test_a_folder_of_a_run_that_starts_or_is_not_understood_stays(tmp_path: Path, content: str) -> None:
    mine = folder(tmp_path, content)
    remove_leftovers(tmp_path)
    assert mine.exists()


def test_a_folder_of_which_an_actor_lives_stays(tmp_path: Path) -> None:
    run_id = uuid.uuid4().hex[:12]
    variables = {**os.environ, RUN_ID: run_id}
    actor = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=variables)
    try:
        used = folder(tmp_path, f"{run_id} {ME.pid} 1.0 {HERE}")
        remove_leftovers(tmp_path)
        assert used.exists()
    finally:
        actor.communicate(b"")


def test_a_folder_of_another_container_stays(tmp_path: Path) -> None:
    theirs = folder(tmp_path, "feedbeef 1 1.0 another/4026531836")
    remove_leftovers(tmp_path)
    assert theirs.exists()


def test_other_folders_stay(tmp_path: Path) -> None:
    other = tmp_path / f"{TEMP_PREFIX}bench"
    other.mkdir()
    remove_leftovers(tmp_path)
    assert other.exists()
