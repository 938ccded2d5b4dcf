"""The lock between runs: one at a time, the next one named who it waits for, and no dead process in the way."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.folders import lock
from rl_safe_workers.checkpoint.folders.lock import check_lock, exclusive
from rl_safe_workers.errors import CheckpointError

HOLD = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
from rl_safe_workers.checkpoint.folders.lock import exclusive
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
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
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


def test_a_lock_whose_folder_has_become_a_file_hides_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def lose_the_folder() -> None:
        with exclusive(folder / "lock", timeout=timedelta(seconds=1), setting="s"):
            folder.rename(tmp_path / "elsewhere")
            folder.touch()
            raise RuntimeError("in the body")

    with pytest.raises(RuntimeError, match="in the body"):
        lose_the_folder()


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
from rl_safe_workers.checkpoint.folders.lock import exclusive
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


def test_no_wait_is_one_try_and_the_error_says_what_is_held_by_whom(tmp_path: Path) -> None:
    with (
        holder(tmp_path / "lock") as process,
        pytest.raises(CheckpointError) as raised,
        exclusive(tmp_path / "lock", timeout=timedelta(0), setting="trainer.default_local_dir", what="the folder x"),
    ):
        raise AssertionError("it was held")
    assert str(raised.value) == (
        f"process {process.pid} on {socket.gethostname()} holds the folder x: let it finish or end it, or change "
        "trainer.default_local_dir"
    )


def test_a_lock_names_its_holder_while_it_is_held(tmp_path: Path) -> None:
    with holder(tmp_path / "lock") as process:
        assert json.loads((tmp_path / "lock").read_text()) == {"host": socket.gethostname(), "pid": process.pid}
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_second_lock_in_the_same_process_is_refused_and_the_first_stays(tmp_path: Path) -> None:
    with exclusive(tmp_path / "lock", timeout=timedelta(0), setting="s"):
        with pytest.raises(CheckpointError, match="this process holds"):
            acquire(tmp_path / "lock", 0)
        check_lock(tmp_path / "lock")
        code = HOLD.replace("seconds=10", "seconds=0")
        other = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "lock"), ""], check=False, capture_output=True
        )
        assert b"holds" in other.stderr
    assert list(tmp_path.iterdir()) == []


def test_threads_of_one_process_take_turns(tmp_path: Path) -> None:
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(5):
            with exclusive(tmp_path / "lock", timeout=timedelta(seconds=60), setting="s"):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1]
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(json.dumps({"host": "gone", "pid": 12}))
    with exclusive(tmp_path / "lock", timeout=timedelta(0), setting="s"):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def linked(path: Path) -> None:
    (path.parent / "theirs").write_text(json.dumps({"host": "h", "pid": 12}))
    path.symlink_to("theirs")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "an empty file": lambda path: path.write_text(""),
    "a text": lambda path: path.write_text("my notes"),
    "JSON of another kind": lambda path: path.write_text('{"name": "poetry.lock"}'),
    "JSON with more": lambda path: path.write_text('{"host": "h", "pid": 12, "note": "mine"}'),
    "JSON of other types": lambda path: path.write_text('{"host": "h", "pid": "12"}'),
    "a list": lambda path: path.write_text("[1]"),
    "deeply nested JSON": lambda path: path.write_text("[" * 100_000),
    "bytes": lambda path: path.write_bytes(bytes(range(256))),
    "a link to a lock": linked,
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a FIFO": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_lock_of_ours_is_refused_and_stays_as_it_is(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out.lock"
    FOREIGN[kind](path)
    before = [(p.name, p.lstat().st_mode, p.lstat().st_mtime_ns, p.lstat().st_size) for p in sorted(tmp_path.iterdir())]
    for refuse in (lambda: acquire(path, 0), lambda: acquire(path, 10), lambda: check_lock(path)):
        with pytest.raises(CheckpointError, match=r"out\.lock cannot be locked: it is no lock of ours, so it is left"):
            refuse()
    after = [(p.name, p.lstat().st_mode, p.lstat().st_mtime_ns, p.lstat().st_size) for p in sorted(tmp_path.iterdir())]
    assert after == before


def test_a_file_that_took_the_locks_name_meanwhile_is_not_removed(tmp_path: Path) -> None:
    with exclusive(tmp_path / "lock", timeout=timedelta(0), setting="s"):
        (tmp_path / "lock").unlink()
        (tmp_path / "lock").write_text("mine")
    assert (tmp_path / "lock").read_text() == "mine"


def test_a_file_system_without_hard_links_has_locks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with exclusive(tmp_path / "lock", timeout=timedelta(0), setting="s"):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_a_free_name_passes_the_check_and_nothing_is_made(tmp_path: Path) -> None:
    check_lock(tmp_path / "lock")
    check_lock(tmp_path / "nowhere" / "lock")
    assert list(tmp_path.iterdir()) == []


def test_a_holder_cannot_give_a_terminal_orders(tmp_path: Path) -> None:
    with holder(tmp_path / "lock"):
        descriptor = os.open(tmp_path / "lock", os.O_WRONLY | os.O_TRUNC)
        os.write(descriptor, json.dumps({"host": "\x1b[2J", "pid": 1}).encode())
        os.close(descriptor)
        with pytest.raises(CheckpointError, match=r"process 1 on \\x1b\[2J holds"):
            acquire(tmp_path / "lock", 0)
