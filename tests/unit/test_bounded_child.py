"""A call in a process of its own: its answer comes back, and nothing else of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_safe_workers.bounded_child import Limits, call_bounded, landlock_version
from rl_safe_workers.errors import CheckpointError, UsageError

LIMITS = Limits(memory_bytes=64 * 2**20, cpu_s=2, wall_s=20.0, answer_bytes=1000)


def _answer(text: str) -> bytes:
    return text.encode()


def _modules() -> bytes:
    return " ".join(sorted({name.partition(".")[0] for name in sys.modules})).encode()


def _refuse(text: str) -> bytes:
    raise UsageError(text)


def _break(text: str) -> bytes:
    raise KeyError(text)


def _allocate() -> bytes:
    return bytes(bytearray(2**30))


def _compute() -> bytes:
    while True:
        pass


def _wait() -> bytes:
    time.sleep(60)
    return b""


def _die(signum: int) -> bytes:
    os.kill(os.getpid(), signum)
    return b""


def _write(path: str) -> bytes:
    Path(path).write_bytes(b"something")
    return b""


def _change(change: str, folder: str) -> bytes:
    at = Path(folder)
    changes: dict[str, Any] = {
        "make": (at / "new").touch,
        "empty": lambda: os.truncate(at / "file", 0),
        "remove": (at / "file").unlink,
        "rename": lambda: (at / "file").rename(at / "folder" / "file"),
        "mkdir": (at / "new").mkdir,
        "rmdir": (at / "folder").rmdir,
        "symlink": lambda: (at / "new").symlink_to("file"),
        "hardlink": lambda: (at / "folder" / "new").hardlink_to(at / "file"),
        "fifo": lambda: os.mkfifo(at / "new"),
    }
    changes[change]()
    return b""


def _print() -> bytes:
    os.write(1, b"noise")
    return b"answer"


def _call(function: Any, limits: Limits = LIMITS, **arguments: Any) -> bytes:
    return call_bounded(function, arguments, limits=limits, subject="FILE", failure=CheckpointError)


def _changed(**changes: Any) -> Limits:
    fields = {name: getattr(LIMITS, name) for name in LIMITS.__slots__}
    return Limits(**{**fields, **changes})


def test_the_answer_comes_back_and_prints_do_not() -> None:
    assert _call(_answer, text="é\ud800".encode("utf-8", "replace").decode()) == b"\xc3\xa9?"
    assert _call(_print) == b"answer"


def test_an_error_of_ours_keeps_its_class_and_any_other_is_one_line() -> None:
    with pytest.raises(UsageError, match="^say this$"):
        _call(_refuse, text="say this")
    with pytest.raises(CheckpointError, match=r"cannot be read: KeyError: ") as found:
        _call(_break, text="\x1b[2J\nx" * 10**5)
    assert len(str(found.value)) <= 1100
    assert str(found.value).isprintable()


@pytest.mark.timeout(60)
def test_each_limit_is_kept_and_named() -> None:
    with pytest.raises(CheckpointError, match="^FILE needs over 64 MiB of memory"):
        _call(_allocate)
    with pytest.raises(CheckpointError, match="takes over 1 s of processor time"):
        _call(_compute, _changed(cpu_s=1))
    with pytest.raises(CheckpointError, match="was not read within 1 s"):
        _call(_wait, _changed(wall_s=1.0))
    with pytest.raises(CheckpointError, match="says more than 1000 bytes"):
        _call(_answer, text="x" * 10**5)


@pytest.mark.parametrize(("signum", "blame"), [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGKILL, "short of memory")])
def test_a_process_that_is_killed_is_an_error_that_says_so(signum: int, blame: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^FILE cannot be read: its reader was killed by .*{blame}"):
        _call(_die, signum=signum)


def test_the_process_writes_no_file_and_takes_none_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="File too large|Permission denied"):
        _call(_write, path=str(tmp_path / "file"))
    assert not (tmp_path / "file").exists() or (tmp_path / "file").read_bytes() == b""
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert _call(_answer, text="well") == b"well"


@pytest.mark.skipif(landlock_version() < 3, reason="this kernel has no Landlock that knows of truncation")
@pytest.mark.parametrize(
    "change", ["make", "empty", "remove", "rename", "mkdir", "rmdir", "symlink", "hardlink", "fifo"]
)
def test_the_process_changes_nothing_on_a_disk(tmp_path: Path, change: str) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=r"PermissionError|Permission denied|cross-device"):
        _call(_change, change=change, folder=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "content"


def test_the_process_loads_no_torch() -> None:
    assert not {"torch", "numpy", "ray", "pydantic"} & set(
        _call(_modules, _changed(answer_bytes=10**5)).decode().split()
    )


@pytest.mark.timeout(60)
def test_the_process_does_not_outlive_its_caller() -> None:
    code = (
        "from tests.unit.test_bounded_child import _call, _wait; import threading; "
        "threading.Thread(target=_call, args=(_wait,)).start()"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    try:
        child = _wait_for_child(caller.pid)
    finally:
        caller.kill()
        caller.wait()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()


def _wait_for_child(pid: int) -> psutil.Process:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        for child in psutil.Process(pid).children():
            if "-I" in child.cmdline():
                time.sleep(0.5)  # until it has tied itself to its caller
                return child
        time.sleep(0.05)
    raise AssertionError("no child")
