"""Temporary files of a killed driver go at the next start; files in use stay."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from rl_safe_workers.env import RUN_ID
from rl_safe_workers.reaping.processes import (
    RAY_FOLDER,
    RUN_FILE,
    TEMP_PREFIX,
    make_run_folder,
    process_namespace,
    remove_leftovers,
    started_ticks,
)

ME = psutil.Process()
HERE = process_namespace()


def folder(temp: Path, content: str) -> Path:
    path = temp / f"{TEMP_PREFIX}{uuid.uuid4().hex[:8]}"
    path.mkdir(mode=0o700)
    (path / RAY_FOLDER).mkdir()
    (path / RUN_FILE).write_text(content)
    return path


def of_nobody() -> str:
    """The files of a run whose driver has ended."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return f"feedbeef {gone.pid} 1 {HERE}"


def test_a_folder_of_which_nobody_lives_goes(tmp_path: Path) -> None:
    left = folder(tmp_path, of_nobody())
    remove_leftovers(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize(
    "content",
    [f"feedbeef {ME.pid} {started_ticks(ME.pid)} {HERE}", "", "feedbeef 12"],
    ids=["starts", "empty", "cut_off"],
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


@pytest.mark.timeout(20)
@pytest.mark.parametrize("target", ["fifo", "/dev/zero", "/proc/kmsg"])
def test_a_run_file_that_is_no_file_stops_nobody(tmp_path: Path, target: str) -> None:
    trap = folder(tmp_path, of_nobody())
    (trap / RUN_FILE).unlink()
    if target == "fifo":
        os.mkfifo(trap / RUN_FILE)
    else:
        (trap / RUN_FILE).symlink_to(target)
    left = folder(tmp_path, of_nobody())
    remove_leftovers(tmp_path)
    assert trap.exists()
    assert not left.exists()


def test_a_run_file_of_any_size_is_not_read_whole(tmp_path: Path) -> None:
    trap = folder(tmp_path, of_nobody())
    with (trap / RUN_FILE).open("ab") as file:
        file.truncate(2**40)
    remove_leftovers(tmp_path)
    assert trap.exists()


def test_a_folder_that_others_may_write_to_stays(tmp_path: Path) -> None:
    shared = folder(tmp_path, of_nobody())
    shared.chmod(0o777)
    remove_leftovers(tmp_path)
    assert shared.exists()


def test_a_link_by_the_name_of_a_run_folder_stays_and_so_does_its_target(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    folder(tmp_path, of_nobody()).rename(target)
    (tmp_path / f"{TEMP_PREFIX}link").symlink_to(target)
    remove_leftovers(tmp_path)
    assert (target / RUN_FILE).exists()
    assert (tmp_path / f"{TEMP_PREFIX}link").is_symlink()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_stays(tmp_path: Path) -> None:
    theirs = folder(tmp_path, of_nobody())
    os.chown(theirs, 12345, 12345)
    remove_leftovers(tmp_path)
    assert theirs.exists()


def test_only_its_user_may_enter_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert make_run_folder("feedbeef").stat().st_mode & 0o777 == 0o700


def test_a_process_that_was_forked_has_ticks_of_its_own_whatever_its_name() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (own,) = {started_ticks(process.pid), started_ticks(process.pid)}
        assert own is not None
        assert own > (started_ticks(os.getpid()) or 0)
    assert started_ticks(process.pid) is None


def test_a_name_in_brackets_is_not_taken_for_the_end_of_it(tmp_path: Path) -> None:
    (program := tmp_path / "a) S 1 1").symlink_to("/bin/sleep")
    with subprocess.Popen([str(program), "60"]) as process:
        while b"a) S 1 1" not in Path(f"/proc/{process.pid}/stat").read_bytes():
            pass
        ticks = started_ticks(process.pid)
        process.kill()
    assert ticks is not None
    assert ticks >= (started_ticks(os.getpid()) or 0)


def test_a_run_that_starts_keeps_its_folder_when_the_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = make_run_folder("feedbeef")
    # What psutil says of a process's time of creation moves with the clock.
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + 3600)
    remove_leftovers(tmp_path)
    assert mine.exists()


def test_a_folder_of_a_reused_process_id_goes(tmp_path: Path) -> None:
    left = folder(tmp_path, f"feedbeef {ME.pid} {(started_ticks(ME.pid) or 0) - 1} {HERE}")
    remove_leftovers(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize("pid", ["-1", "1e9", "9" * 400, "0x10", "0", "12/../1"])
def test_a_forged_process_id_stops_nobody(tmp_path: Path, pid: str) -> None:
    folder(tmp_path, f"feedbeef {pid} 1 {HERE}")
    left = folder(tmp_path, of_nobody())
    remove_leftovers(tmp_path)
    assert not left.exists()
