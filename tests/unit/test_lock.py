"""The lock between runs: one at a time, the next one named who it waits for, and no dead process in the way."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint import lock
from rl_safe_workers.checkpoint.lock import exclusive
from rl_safe_workers.errors import CheckpointError

HOLD = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
from rl_safe_workers.checkpoint.lock import exclusive
with exclusive(Path(sys.argv[1]), timeout=timedelta(seconds=10), setting="s"):
    if sys.argv[2] == "fork" and os.fork() == 0:
        time.sleep(60)
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(path: Path, how: str = "alone") -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    assert int(process.stdout.readline()) == process.pid
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


def acquire(path: Path, timeout_s: float) -> bool:
    with exclusive(path, timeout=timedelta(seconds=timeout_s), setting="rl_safe.timeouts.convert") as has_waited:
        return has_waited


def test_a_free_lock_is_had_at_once_and_leaves_no_file(tmp_path: Path) -> None:
    assert not acquire(tmp_path / "lock", 0)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with exclusive(tmp_path / "lock", timeout=timedelta(seconds=1), setting="s"):
            raise RuntimeError("in the body")

    with pytest.raises(RuntimeError, match="in the body"):
        fail()
    assert not acquire(tmp_path / "lock", 0)


def test_whoever_waits_in_vain_is_told_for_whom(tmp_path: Path) -> None:
    with holder(tmp_path / "lock") as process:
        message = f"process {process.pid} on {re.escape(socket.gethostname())} has held .*/lock for the .* s"
        with pytest.raises(CheckpointError, match=f"{message}.*raise rl_safe.timeouts.convert"):
            acquire(tmp_path / "lock", 0.3)


def test_the_next_one_has_it_when_the_holder_lets_go(tmp_path: Path) -> None:
    with holder(tmp_path / "lock") as process:
        assert process.stdin is not None
        threading.Timer(0.3, process.stdin.close).start()
        assert acquire(tmp_path / "lock", 10)
    assert list(tmp_path.iterdir()) == []


def test_a_holder_that_dies_is_not_in_the_way(tmp_path: Path) -> None:
    with holder(tmp_path / "lock") as process:
        process.kill()
        assert isinstance(acquire(tmp_path / "lock", 10), bool)


def test_a_writer_process_that_outlives_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    with holder(tmp_path / "lock", "fork") as process:
        process.kill()
        process.wait()
        assert not acquire(tmp_path / "lock", 0)


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, try_lock, removals = tmp_path / "lock", lock._try_lock, [True]

    def remove_first(descriptor: int) -> bool:
        if removals and removals.pop():
            path.unlink()
        return try_lock(descriptor)

    monkeypatch.setattr(lock, "_try_lock", remove_first)
    with exclusive(path, timeout=timedelta(seconds=10), setting="s"):
        assert path.exists()


COUNT = """
import sys, time
from datetime import timedelta
from pathlib import Path
from rl_safe_workers.checkpoint.lock import exclusive
root = Path(sys.argv[1])
for _ in range(8):
    with exclusive(root / "lock", timeout=timedelta(seconds=60), setting="s"):
        count = int((root / "count").read_text())
        time.sleep(0.01)
        (root / "count").write_text(str(count + 1))
"""


def test_no_two_processes_have_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    processes = [subprocess.Popen([sys.executable, "-c", COUNT, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "24"


def test_a_place_that_has_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be locked"):
        acquire(tmp_path / "nowhere" / "lock", 0)
