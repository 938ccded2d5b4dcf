"""Processes that we start: they import what their caller does, and nothing of the working directory."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import rl_safe_workers
from rl_safe_workers.doctor.probes import ask
from rl_safe_workers.own_process import module_command
from rl_safe_workers.reaping.guardian import Guardian
from rl_safe_workers.reaping.ipc_files import Moment

ROOT = Path(rl_safe_workers.__file__).parents[1]
SHADOWS = ("json", "logging", "psutil", "ray", "rl_safe_workers", "runpy", "torch", "transformers")


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once anything of the working directory has run."""
    folder, canary = tmp_path / "evil", tmp_path / "canary"
    folder.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open({str(canary)!r}, 'w'); raise SystemExit(7)")
    monkeypatch.chdir(folder)
    return canary


def test_the_guardian_runs_nothing_of_the_working_directory(canary: Path) -> None:
    guardian = Guardian(uuid.uuid4().hex, since=Moment(0.0, 0.0), kill_after_s=1.0)
    guardian.dismiss(timeout_s=20.0)
    assert guardian._process.returncode == 0
    assert not canary.exists()


@pytest.mark.timeout(120)
def test_a_probe_runs_nothing_of_the_working_directory(canary: Path) -> None:
    answer = ask("torch_probe", deadline_s=100.0)
    assert answer.values, answer.reason
    assert not canary.exists()


def test_a_module_gets_its_arguments_and_its_own_name(canary: Path) -> None:
    done = subprocess.run(module_command("rl_safe_workers", "--version"), check=True, capture_output=True, text=True)
    assert done.stdout.startswith("rl-safe")
    assert not canary.exists()


def test_a_checkout_finds_itself_from_its_own_root() -> None:
    code = (
        "import subprocess; from rl_safe_workers.own_process import module_command as c; subprocess.run({}, check=True)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (
        [sys.executable, "-c", code.format("c('rl_safe_workers', '--version')")],
        [sys.executable, "-c", code.format("c('rl_safe_workers', '--version'), cwd='/'")],
    ):
        done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
        assert done.stdout.startswith("rl-safe")


@pytest.mark.parametrize(
    "what",
    ["print('x' * 2**20)", "import atexit, threading; atexit.register(threading.Event().wait)"],
    ids=["nobody reads its stdout", "a library waits at the exit"],
)
def test_a_process_ends_although_something_holds_it_up(what: str) -> None:
    code = f"from rl_safe_workers.own_process import end_within; end_within(1.0); {what}"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(20) == 1
    assert "Timeout (0:00:01)!" in said


def test_a_process_ends_although_nobody_reads_anything_of_it() -> None:
    """The kernel ends it."""
    code = "from rl_safe_workers.own_process import end_within; end_within(0.5); print('x' * 2**20)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.wait(30) == -signal.SIGALRM


def test_no_python_is_started_with_the_working_directory_on_its_path() -> None:
    """Every list that begins with ``sys.executable`` goes on with ``-P`` or ``-I``."""
    found = 0
    for path in sorted((ROOT / "rl_safe_workers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                found += 1
                assert ast.unparse(node.elts[1]) in ("'-P'", "'-I'"), f"{path}:{node.lineno}"
    assert found == 2
