"""Files of processes in shared memory go with them, and nobody else's do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_safe_workers.reaping.ipc_files import SHARED_MEMORY, Moment, remove_ipc_files, segments_of

PID = 3550
LONG_AGO = Moment(unix_s=0.0, monotonic_s=0.0)


def test_only_the_files_of_those_processes_go(tmp_path: Path) -> None:
    user = os.getuid()
    gone = (f"torch_{PID}_2659072989_0", f"cuda.shm.{user}.dde.1", f"cuda.shm.{user}.dde.2")
    kept = (
        f"torch_{PID}1_7_0",
        f"cuda.shm.{user}.dde1.1",
        f"cuda.shm.{user + 1}.dde.1",
        "psm_3550",
        f"torch_{PID - 1}_1_0",
    )
    for name in (*gone, *kept):
        (tmp_path / name).touch()
    remove_ipc_files([PID, PID + 100], since=LONG_AGO, folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_file_that_cannot_be_removed_does_not_keep_the_others(tmp_path: Path) -> None:
    (tmp_path / f"torch_{PID}_1_0").mkdir()
    (tmp_path / f"torch_{PID}_2_0").touch()
    remove_ipc_files([PID], since=LONG_AGO, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"torch_{PID}_1_0"]


def test_files_from_before_the_run_are_of_another_process_by_the_same_number(tmp_path: Path) -> None:
    (file := tmp_path / f"torch_{PID}_1_0").touch()
    written_s = file.stat().st_mtime
    remove_ipc_files([PID], since=Moment(written_s + 1, time.monotonic()), folder=tmp_path)
    assert file.exists()
    remove_ipc_files([PID], since=Moment(written_s, time.monotonic()), folder=tmp_path)
    assert not file.exists()


def test_files_of_the_run_go_though_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = Moment.now()
    (file := tmp_path / f"torch_{PID}_1_0").touch()
    wall_clock = time.time
    monkeypatch.setattr(time, "time", lambda: wall_clock() - 3600)
    set_back_s = time.time()
    os.utime(file, (set_back_s, set_back_s))
    remove_ipc_files([PID], since=began, folder=tmp_path)
    assert not file.exists()


def test_files_from_before_the_run_stay_though_the_clock_was_set_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / f"torch_{PID}_1_0").touch()
    began = Moment(unix_s=file.stat().st_mtime + 1, monotonic_s=time.monotonic())
    wall_clock = time.time
    monkeypatch.setattr(time, "time", lambda: wall_clock() + 3600)
    remove_ipc_files([PID], since=began, folder=tmp_path)
    assert file.exists()


MAKES_A_SEGMENT = """
import sys, time
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(*sys.argv[1:], create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")  # as vLLM does, so that nobody else removes it
print(segment.name, flush=True)
time.sleep(100)
"""


@pytest.fixture(params=["python", "verl"])
def killed(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a segment of shared memory, which a test may kill."""
    since = Moment.now()
    named = [f"verl_weights_{uuid.uuid4().hex}"] if request.param == "verl" else []
    command = [sys.executable, "-c", MAKES_A_SEGMENT, *named]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        segment = SHARED_MEMORY / process.stdout.readline().strip()
        try:
            yield process, segment
        finally:
            process.kill()
            process.wait()
            remove_ipc_files([], since=since, segments=[segment])


def test_a_segment_of_a_killed_process_goes(killed: tuple[subprocess.Popen[str], Path]) -> None:
    process, segment = killed
    found = segments_of([process.pid, 2**22 + 1])
    assert found == {segment}
    process.kill()
    process.wait()
    remove_ipc_files([process.pid], since=LONG_AGO, segments=found)
    assert not segment.exists()


def test_a_segment_that_a_living_process_has_mapped_stays(killed: tuple[subprocess.Popen[str], Path]) -> None:
    _, segment = killed
    remove_ipc_files([PID], since=LONG_AGO, segments=[segment])
    assert segment.exists()


def test_semaphores_of_loky_go_with_their_process(tmp_path: Path) -> None:
    for name in (f"sem.loky-{PID}-a1b2", f"sem.loky-{PID}1-a1b2"):
        (tmp_path / name).touch()
    remove_ipc_files([PID], since=LONG_AGO, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"sem.loky-{PID}1-a1b2"]
