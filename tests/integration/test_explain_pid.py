"""`rl-safe explain --pid` on gloo ranks that torchrun or a script has started, without this package in them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent
RANK = HERE / "onlooked_rank.py"
PATIENCE_S = 120.0
COMMAND = ("-m", "rl_safe_workers", "explain", "--pid")
WHERE = "tests/integration/onlooked_rank.py"
SOURCE = RANK.read_text(encoding="utf-8").splitlines()
SLEEPS_AT = f"{WHERE}:{next(n for n, line in enumerate(SOURCE, 1) if 'line of a sleeping' in line)} (misbehave)"

Start = Callable[..., list[int]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts four ranks with a fault in one; returns the launcher's process, or those of the ranks."""
    started: list[subprocess.Popen[bytes]] = []

    def start_ranks(fault: str, culprit: int = 1, *, launcher: bool = True) -> list[int]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        arguments = [str(RANK), fault, str(culprit), str(tmp_path)]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if launcher:
            options = ["--nproc-per-node", "4", "--master-addr", "127.0.0.1", "--master-port", str(port)]
            commands = [([sys.executable, "-m", "torch.distributed.run", *options, *arguments], variables)]
        else:
            job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4"}
            commands = [([sys.executable, *arguments], {**variables, **job, "RANK": str(rank)}) for rank in range(4)]
        for command, environment in commands:
            quiet = subprocess.DEVNULL
            started.append(subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=quiet, stderr=quiet))
        deadline_s = time.monotonic() + PATIENCE_S
        while len(list(tmp_path.glob("ready_*"))) < 4:
            assert time.monotonic() < deadline_s, "the ranks do not start"
            time.sleep(0.1)
        return [process.pid for process in started]

    yield start_ranks
    for process in started:
        for one in psutil.Process(process.pid).children(recursive=True):
            # A child that waits for its own start holds its parent: it goes first.
            one.kill()
        process.kill()
        process.wait()


def run_explain(pids: list[int], json_file: Path) -> dict[str, Any]:
    result = subprocess.run(
        [
            sys.executable,
            *COMMAND,
            *map(str, pids),
            "--json",
            str(json_file),
            "--html",
            str(json_file.with_suffix(".html")),
        ],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    found: dict[str, Any] = json.loads(json_file.read_text())
    assert result.returncode == (0 if found["is_known"] else 1), result.stderr
    assert result.stdout.splitlines()[:2] == [found["verdict"], f"to do: {found['advice']}"]
    return found


def explain(pids: list[int], folder: Path) -> dict[str, Any]:
    """Explains again while ranks are still on their way: a busy machine needs a moment to get there."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        found = run_explain(pids, folder / "why")
        still = sum("waits in" in row["what"] for row in found["rows"]) >= 2
        if (still and "the ranks move" not in found["verdict"]) or time.monotonic() > deadline_s:
            return found
        time.sleep(1)


def wait_for_end(pid: int) -> None:
    """Waits until a child has ended; it stays a zombie."""
    deadline_s = time.monotonic() + PATIENCE_S
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "the rank does not end"
        time.sleep(0.1)


def ranks_of(culprits: list[str]) -> list[str]:
    return [name.partition(" (")[0] for name in culprits]


@pytest.mark.parametrize(
    ("fault", "culprit", "says"),
    [
        ("stopped", 2, "is stopped (SIGSTOP)"),
        ("sleeps", 0, f"is at {SLEEPS_AT}; ranks 1-3 wait for it in all_reduce of the world"),
        pytest.param("works", 1, f"is working at {WHERE}", marks=pytest.mark.every_case),
        ("other", 3, f"is in barrier of the world at {WHERE}"),
        pytest.param("pipe", 1, "waits at a pipe whose other end process", marks=pytest.mark.every_case),
        pytest.param("lock", 1, "/lock, which process", marks=pytest.mark.every_case),
        pytest.param("disk", 1, "is in uninterruptible sleep", marks=pytest.mark.every_case),
        pytest.param(
            "sleeps-outside-pair",
            1,
            f"is at {SLEEPS_AT}; ranks 0, 2-3 wait for it in all_reduce of a group, barrier",
            marks=pytest.mark.every_case,
        ),
        pytest.param("receive-chain", 3, "ranks 0-2 wait for it in recv from rank 1", marks=pytest.mark.every_case),
        pytest.param("sleeps-before-async", 1, f"is at {SLEEPS_AT}", marks=pytest.mark.every_case),
    ],
)
def test_the_rank_that_holds_the_others_up_is_named(
    fault: str, culprit: int, says: str, start: Start, tmp_path: Path
) -> None:
    found = explain(start(fault, culprit), tmp_path)
    assert ranks_of(found["culprits"]) == [f"rank {culprit}"]
    assert says in found["verdict"]
    assert found["verdict"] in (tmp_path / "why.html").read_text()


def test_a_killed_rank_of_a_script_is_named_by_the_rank_that_is_missing(start: Start, tmp_path: Path) -> None:
    found = explain(start("killed-early", 2, launcher=False), tmp_path)
    assert ranks_of(found["culprits"]) == ["rank 2"]
    assert "was killed by SIGKILL" in found["verdict"]


def test_of_ranks_that_have_ended_the_killed_one_is_named(start: Start, tmp_path: Path) -> None:
    pids = start("killed", 2, launcher=False)
    for pid in pids:  # gloo notices the loss, and the others raise
        wait_for_end(pid)
    result = run_explain(pids, tmp_path / "w")
    assert result["culprits"] == [f"process {pids[2]}"]
    assert "was killed by SIGKILL" in result["verdict"]


def test_the_rank_that_is_left_when_all_others_have_ended_is_named(start: Start, tmp_path: Path) -> None:
    (launcher,) = start("sleeps-last", 2)
    deadline_s = time.monotonic() + PATIENCE_S
    while len(psutil.Process(launcher).children()) > 1:
        assert time.monotonic() < deadline_s, "the other ranks do not end"
        time.sleep(0.1)
    result = run_explain([launcher], tmp_path / "w")
    assert ranks_of(result["culprits"]) == ["rank 2"]
    assert result["verdict"].endswith(f" is at {SLEEPS_AT}; all other ranks have ended")


def test_the_other_ranks_of_a_job_are_found_from_one(start: Start, tmp_path: Path) -> None:
    pids = start("sleeps", 3, launcher=False)
    found = explain(pids[:1], tmp_path)
    assert (ranks_of(found["culprits"]), len(found["rows"])) == (["rank 3"], 4)


@pytest.mark.parametrize("fault", ["pairs-crossed", pytest.param("moves", marks=pytest.mark.every_case)])
def test_nobody_is_named_where_the_facts_do_not_allow_it(fault: str, start: Start, tmp_path: Path) -> None:
    pids = start(fault, -1)
    time.sleep(2)
    found = run_explain(pids, tmp_path / "w")
    assert (found["culprits"], found["is_known"]) == ([], False)
    assert found["verdict"].startswith("not known, because ")


def test_looking_changes_nothing_in_a_stopped_rank(start: Start, tmp_path: Path) -> None:
    (launcher,) = start("stopped", 0)
    explain([launcher], tmp_path)
    states = [one.status() for one in psutil.Process(launcher).children()]
    assert states.count(psutil.STATUS_STOPPED) == 1
    for one in psutil.Process(launcher).children():
        one.send_signal(signal.SIGCONT)
