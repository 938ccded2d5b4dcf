"""Stopped processes are told apart from others, named, and ended in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_safe_workers import env
from rl_safe_workers.diagnostics.diagnosis import diagnose
from rl_safe_workers.diagnostics.inquiry import RankProcess
from rl_safe_workers.diagnostics.rank_files import place_file
from rl_safe_workers.diagnostics.stopped import (
    Changes,
    MachineWatch,
    Stop,
    StoppedProcess,
    StoppedProcessWatch,
    StopTimes,
    forget_stops,
    read_stops,
    stopped_processes,
)
from rl_safe_workers.errors import Stopped
from rl_safe_workers.ranks import RankId, Role, trainer_id
from rl_safe_workers.reaping.processes import stat_of

IDLE = "import time; time.sleep(300)"
TRACED = """
import ctypes, os, signal, time
ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # PTRACE_TRACEME: the parent is the debugger
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(300)
"""
LIMIT_S = 1.5


def test_a_stop_is_told_once_and_expires_once() -> None:
    times: StopTimes[str] = StopTimes(10.0)
    assert times.look([], 0.0) == Changes([], [], [])
    assert times.look(["a"], 1.0) == Changes(["a"], [], [])
    assert times.look(["a", "b"], 10.9) == Changes(["b"], [], [])
    assert times.look(["a", "b"], 11.0) == Changes([], [], [("a", 10.0)])
    assert times.look(["a", "b"], 12.0) == Changes([], [], [])
    assert times.look(["b"], 13.0) == Changes([], [("a", 12.0)], [])


def test_a_look_that_fails_each_time_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failures: list[Exception | None] = [OSError(24, "Too many open files")] * 3 + [None, OSError(24, "Too many")]

    def find() -> list[StoppedProcess]:
        if (failure := failures.pop(0)) is not None:
            raise failure
        return []

    watch = StoppedProcessWatch(tmp_path, LIMIT_S, find)
    for _ in range(5):
        watch.look_or_tell()
    assert len(caplog.records) == 2


def test_a_stop_that_ends_and_begins_again_counts_anew() -> None:
    times: StopTimes[str] = StopTimes(10.0)
    times.look(["a"], 0.0)
    times.look([], 9.0)
    assert times.look(["a"], 9.5) == Changes(["a"], [], [])
    assert times.look(["a"], 19.4).expired == []
    assert times.look(["a"], 19.5).expired == [("a", 10.0)]


def test_a_watch_that_was_stopped_itself_counts_anew() -> None:
    times: StopTimes[str] = StopTimes(10.0)
    times.look(["a"], 0.0)
    assert times.look(["a"], 3600.0, is_late=True) == Changes([], [], [])
    assert times.look(["a"], 3609.9).expired == []
    assert times.look(["a"], 3610.0).expired == [("a", 10.0)]


def _process(*pids: int, rank_id: RankId | None = None, is_rank: bool = False) -> StoppedProcess:
    return StoppedProcess(pids=pids, started=5, rank_id=rank_id, is_rank=is_rank, name="EngineCore")


@pytest.mark.parametrize("rank_id", [None, trainer_id(3)])
def test_the_record_of_a_stop_reads_as_it_was_written(rank_id: RankId | None) -> None:
    stop = Stop(process=_process(7, 5, rank_id=rank_id), place="x.py:1 (f)", at_s=12.5)
    assert Stop.from_text(stop.to_text().encode()) == stop


def test_a_record_that_is_none_is_passed_over_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "stopped_1.json").write_text('{"pids": 3}')
    (tmp_path / "stopped_2.json").write_text("no JSON")
    (tmp_path / "stopped_3.json").write_text(Stop(process=_process(3), place=None, at_s=1.0).to_text())
    assert [stop.process.pid for stop in read_stops(tmp_path)] == [3]
    assert "stopped_1.json cannot be read" in caplog.text
    assert "stopped_2.json cannot be read" in caplog.text


def test_stops_of_a_rank_that_is_replaced_are_forgotten_and_those_of_others_are_not(tmp_path: Path) -> None:
    for pid, rank in ((3, 1), (4, 2)):
        process = _process(pid, rank_id=RankId(Role.ROLLOUT, rank))
        (tmp_path / f"stopped_{pid}.json").write_text(Stop(process=process, place=None, at_s=1.0).to_text())
    forget_stops(tmp_path, RankId(Role.ROLLOUT, 1))
    assert [stop.process.pid for stop in read_stops(tmp_path)] == [4]


def test_the_stop_of_a_child_is_its_ranks() -> None:
    engine, rollout = Stop(process=_process(30, 20, 10), place=None, at_s=1.0), RankId(Role.ROLLOUT, 2)
    assert engine.rank_of({10: trainer_id(0), 20: rollout}) == rollout
    assert engine.rank_of({11: trainer_id(0)}) is None
    assert engine.failure(rollout, 20).text == "has a process that is stopped, 30 (EngineCore)"
    assert engine.failure(rollout, 30).text == "is stopped"
    assert engine.failure(rollout, 30).cause == Stopped()


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def start(run_id: str) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started = []

    def start(
        code: str = IDLE, mark: str = run_id, stdout: int | None = None, **variables: str
    ) -> subprocess.Popen[bytes]:
        environ = {**env.marked(mark), **variables}
        process = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=stdout)
        started.append(process)
        return process

    yield start
    for process in started:
        if _state(process) == "t":  # Popen takes a stop of a process that is traced by us for its end
            os.kill(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    _await(lambda: _state(process) == "T", "the process is stopped")


def _state(process: subprocess.Popen[bytes]) -> str | None:
    stat = stat_of(process.pid)
    return None if stat is None else stat.state


def _await(is_so: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until_s, what
        time.sleep(0.02)


def test_only_stopped_processes_of_the_run_are_found(run_id: str, start, tmp_path: Path) -> None:
    ours, others, running = start(), start(mark="another"), start()
    child = start(RL_SAFE_ROLE="rollout", RL_SAFE_RANK="1")
    traced = start(TRACED)
    _await(lambda: _state(traced) == "t", "the debugger has it")
    (tmp_path / place_file(trainer_id(4))).write_text(f"train.py:3 (step)\n{ours.pid}\n")
    for process in (ours, others, child):
        _stop(process)
    found = {one.pid: one for one in stopped_processes(run_id, tmp_path)}
    assert found.keys() == {ours.pid, child.pid}
    assert running.poll() is None
    assert found[ours.pid].who == f"training rank 4 (process {ours.pid})"
    assert found[ours.pid].pids[1] == os.getpid()
    assert found[child.pid].who.endswith(" of rollout rank 1")


def test_a_process_that_stays_stopped_is_named_and_ended(
    run_id: str, start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "answers"
    folder.mkdir(mode=0o700)
    process, well = start(), start()
    (folder / place_file(trainer_id(1))).write_text(f"train.py:3 (step)\n{process.pid}\n")
    watch = MachineWatch(run_id, folder, LIMIT_S)
    try:
        _stop(process)
        stopped_s = time.monotonic()
        _await(lambda: f"training rank 1 (process {process.pid}) is stopped" in caplog.text, "the stop is named")
        named_s = time.monotonic() - stopped_s
        assert process.wait(30) == -signal.SIGKILL
    finally:
        watch.close()
    assert "was resumed after" not in caplog.text
    assert named_s < LIMIT_S, "the warning comes while there is time to continue the process"
    assert (
        "last seen at train.py:3 (step): it is killed if it stays stopped for 2 s; to resume it: kill -CONT"
        in caplog.text
    )
    assert well.poll() is None
    (stop,) = read_stops(folder)
    assert (stop.process.rank_id, stop.process.is_rank, stop.place) == (trainer_id(1), True, "train.py:3 (step)")
    # What the others hear of is a death. The verdict says what it was.
    ranks = [
        RankProcess(rank_id=trainer_id(1), pid=process.pid, folder=folder, never_ends=True),
        RankProcess(rank_id=trainer_id(0), pid=well.pid, folder=folder, never_ends=True),
    ]
    found = diagnose(ranks, patience_s=5.0)
    assert found.verdict == "training rank 1 is stopped, last seen at train.py:3 (step)"
    assert found.culprits == {trainer_id(1)}
    assert "it was ended: see the setting timeouts.stopped" in found.advice


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(child.pid, flush=True)
child.wait()
"""


def test_a_rank_whose_child_stays_stopped_is_named_with_it(run_id: str, start, tmp_path: Path) -> None:
    server = start(PARENT, stdout=subprocess.PIPE)
    child = int(server.stdout.readline())
    watch = MachineWatch(run_id, tmp_path, LIMIT_S)
    try:
        os.kill(child, signal.SIGSTOP)
        server.wait(30)  # as an engine's server fails once its engine has died
    finally:
        watch.close()
    rollout = RankId(Role.ROLLOUT, 0)
    ranks = [RankProcess(rank_id=rollout, pid=server.pid, folder=tmp_path, never_ends=True)]
    found = diagnose(ranks, patience_s=5.0)
    assert re.fullmatch(rf"rollout rank 0 has a process that is stopped, {child} \(python\S*\)", found.verdict)
    assert found.culprits == {rollout}


def test_a_process_that_goes_on_in_time_is_left_alone(
    run_id: str, start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = start()
    watch = MachineWatch(run_id, tmp_path, 3600.0)
    try:
        _stop(process)
        _await(lambda: f"process {process.pid} " in caplog.text, "the stop is named")
        process.send_signal(signal.SIGCONT)
        _await(lambda: "was resumed after" in caplog.text, "the end of the stop is named")
    finally:
        watch.close()
    assert process.poll() is None
    assert read_stops(tmp_path) == []


def test_a_limit_of_zero_watches_nobody(run_id: str, tmp_path: Path) -> None:
    for limit_s, threads in ((0.0, 0), (1.0, 1)):
        watch = MachineWatch(run_id, tmp_path, limit_s)
        assert sum(thread.name == "stop-watch" for thread in threading.enumerate()) == threads
        watch.close()


RANK = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from rl_safe_workers.diagnostics.neighbours import Neighbours
Neighbours("key", rank=int(sys.argv[2]), stop_limit_s=1.5)
print("joined", flush=True)
time.sleep(300)
"""


def test_ranks_of_a_machine_look_after_each_other_whoever_of_them_has_died(tmp_path: Path) -> None:
    ranks = []
    try:
        for rank in range(5):
            command = [sys.executable, "-c", RANK, str(tmp_path), str(rank)]
            with (tmp_path / f"log_{rank}").open("w") as log:
                ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log))
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == b"joined\n"
        ranks[3].kill()
        ranks[3].wait()
        for rank in (4, 0):  # with the dead one between them and rank 2, which has to see past all of them
            _stop(ranks[rank])
        assert [ranks[rank].wait(60) for rank in (4, 0)] == [-signal.SIGKILL] * 2
        assert [ranks[rank].poll() for rank in (1, 2)] == [None, None]
        _await(
            lambda: "the job has failed on training rank " in (tmp_path / "log_2").read_text(), "the verdict is told"
        )
        assert (tmp_path / "log_1").read_text() == ""
        # The verdict on the first one ends the other one, which no SIGTERM would reach.
        assert [stop.process.rank_id for stop in read_stops(tmp_path / "rl_safe_ranks_key")] == [trainer_id(4)]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
