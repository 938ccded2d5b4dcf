"""The process that ends what is left of a run whose driver was killed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rl_safe_workers.env import RANK, ROLE, RUN_ID
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.reaping.guardian import DONE, Guardian, guard, lines_of
from rl_safe_workers.reaping.ipc_files import Moment
from rl_safe_workers.reaping.processes import end_rank, ended, is_alive, reap, run_processes

LONG_AGO = Moment(unix_s=0.0, monotonic_s=0.0)
DRIVER = """
import sys, time
from pathlib import Path
from rl_safe_workers.reaping.guardian import Guardian
from rl_safe_workers.reaping.ipc_files import Moment
guardian = Guardian(sys.argv[1], since=Moment(0.0, 0.0), kill_after_s=1.0)
guardian.tell(folders=[Path(sys.argv[2])])
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex[:12]


@pytest.fixture
def actor(run_id: str) -> Iterator[psutil.Process]:
    """A process of the run that takes no notice of being asked to end."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", stubborn]
    with subprocess.Popen(command, env=os.environ | {RUN_ID: run_id}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield psutil.Process(process.pid)
        process.kill()


def guardian_of(run_id: str) -> psutil.Process:
    """Once it is no child of its driver any more."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if {run_id, "rl_safe_workers.reaping.guardian"} <= {*process.cmdline()} and process.ppid() == 1:
                    return process
        time.sleep(0.02)
    raise AssertionError("no guardian")


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def wait_for_end(process: psutil.Process, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not has_ended(process):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_driver_takes_processes_and_folders_along(run_id: str, actor: psutil.Process, tmp_path: Path) -> None:
    folder = tmp_path / "of_the_run"
    (folder / "session").mkdir(parents=True)
    command = [sys.executable, "-c", DRIVER, run_id, str(folder)]
    # The driver bears the mark, as with a local Ray; its guardian must not, or it would end itself.
    with subprocess.Popen(command, env=os.environ | {RUN_ID: run_id}, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        guardian = guardian_of(run_id)
        assert RUN_ID not in guardian.environ()
        # As `ray job stop` does, which looks for children of children.
        assert not any(map(is_alive, psutil.Process(driver.pid).children(recursive=True)))
        guardian.terminate()
        driver.kill()
    wait_for_end(actor)
    wait_for_end(guardian)
    assert not folder.exists()


def test_a_driver_that_is_done_leaves_nothing_to_do(run_id: str, actor: psutil.Process, tmp_path: Path) -> None:
    guardian = Guardian(run_id, since=LONG_AGO, kill_after_s=1.0)
    guardian.tell(folders=[tmp_path])
    guardian.dismiss(timeout_s=10.0)
    assert guardian._process.returncode == 0
    assert not has_ended(actor)
    assert tmp_path.exists()


def test_a_segment_of_a_process_that_was_killed_during_the_run_goes_at_its_end(run_id: str) -> None:
    makes_a_segment = (
        "import time; from multiprocessing.shared_memory import SharedMemory; "
        "segment = SharedMemory(create=True, size=4096); print(segment.name, flush=True); time.sleep(60)"
    )
    command, variables = [sys.executable, "-c", makes_a_segment], os.environ | {RUN_ID: run_id}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        segment = Path("/dev/shm", process.stdout.readline().strip())

        def told() -> Iterator[str | None]:
            yield None
            os.killpg(process.pid, signal.SIGKILL)  # the resource tracker, too
            process.wait()
            yield None
            assert segment.exists()
            yield json.dumps({DONE: True})

        assert not guard(told(), run_id, since=LONG_AGO, kill_after_s=0.2)
    assert not segment.exists()


def test_lines_come_whole_and_none_when_nothing_comes() -> None:
    reader, writer = os.pipe()
    lines = lines_of(reader, every_s=0.01)
    assert next(lines) is None
    os.write(writer, b'{"pids": [1')
    assert next(lines) is None
    os.write(writer, b"]}\n{}\ncut")
    assert [next(lines), next(lines), next(lines)] == ['{"pids": [1]}', "{}", None]
    os.close(writer)
    assert [*lines] == ["cut"]
    os.close(reader)


LEAVING_DRIVER = """
import os, subprocess, sys, time
from rl_safe_workers.reaping.guardian import Guardian
from rl_safe_workers.reaping.ipc_files import Moment
guardian = Guardian(sys.argv[1], since=Moment(0.0, 0.0), kill_after_s=1.0)
guardian.stay()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
sys.stdin.readline()
"""


def test_what_a_thread_starts_after_the_last_sweep_ends_after_the_driver(run_id: str, actor: psutil.Process) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEAVING_DRIVER, run_id],
        env=os.environ | {RUN_ID: run_id},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        child = psutil.Process(int(driver.stdout.readline()))
        assert not has_ended(child)
        _, said = driver.communicate("\n", timeout=30)
    wait_for_end(child)
    assert said == ""


def test_what_was_cut_off_ends_the_run_too(run_id: str, actor: psutil.Process, tmp_path: Path) -> None:
    whole = f'{{"pids": [], "folders": ["{tmp_path}"]}}\n'
    assert guard(io.StringIO(whole + '{"pids": [1'), run_id, since=LONG_AGO, kill_after_s=0.2)
    assert has_ended(actor)
    assert not tmp_path.exists()


def test_a_guardian_that_was_killed_is_missed_not_waited_for(run_id: str, caplog: pytest.LogCaptureFixture) -> None:
    guardian = Guardian(run_id, since=LONG_AGO, kill_after_s=1.0)
    process = guardian_of(run_id)
    process.kill()
    wait_for_end(process)
    guardian.tell(pids=[1])
    assert "guardian has ended" in caplog.text
    guardian.dismiss(timeout_s=10.0)


def test_a_process_that_nobody_has_asked_for_yet_has_ended(run_id: str, actor: psutil.Process) -> None:
    actor.kill()
    while actor.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert psutil.pid_exists(actor.pid)
    assert ended([actor.pid, os.getpid()]) == [actor.pid]
    assert run_processes(run_id) == []


def test_what_takes_no_notice_is_killed_and_not_waited_for(run_id: str, actor: psutil.Process) -> None:
    started_s = time.monotonic()
    # It becomes a zombie of this process, which does not wait for it.
    reap(run_id, kill_after_s=0.5)
    assert has_ended(actor)
    assert time.monotonic() - started_s < 5


def test_a_stopped_process_is_killed_and_never_goes_on(run_id: str, tmp_path: Path) -> None:
    wrote = tmp_path / "wrote"
    code = f"import os, signal; os.kill(os.getpid(), signal.SIGSTOP); open({str(wrote)!r}, 'w')"
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ | {RUN_ID: run_id}) as process:
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        reap(run_id, kill_after_s=0.2)
        assert has_ended(psutil.Process(process.pid))
    assert not wrote.exists()


def test_the_end_of_one_rank_is_that_of_its_children_and_of_nobody_else(run_id: str) -> None:
    """One of its processes is stopped, and takes no notice of a request."""
    marks = [{ROLE: Role.ROLLOUT, RANK: rank} for rank in "112"]
    started = [subprocess.Popen(["sleep", "60"], env=os.environ | {RUN_ID: run_id} | mark) for mark in marks]
    try:
        started[0].send_signal(signal.SIGSTOP)
        assert end_rank(run_id, RankId(Role.ROLLOUT, 1), timeout_s=10.0) == []
        assert [has_ended(psutil.Process(process.pid)) for process in started] == [True, True, False]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_process_that_starts_its_program_is_found(
    run_id: str, actor: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel then shows no environment for some milliseconds."""
    shown: list[dict[str, str]] = [{}]
    read = psutil.Process.environ

    def environ(process: psutil.Process) -> dict[str, str]:
        return shown.pop() if process == actor and shown else read(process)

    monkeypatch.setattr(psutil.Process, "environ", environ)
    assert run_processes(run_id) == [actor]
    assert shown == []


@pytest.mark.parametrize("ends", ["rank", "run"])
def test_a_killed_process_leaves_no_named_semaphore(run_id: str, ends: str) -> None:
    """multiprocessing makes one for each lock of a process that it spawns. Its resource tracker removes them."""
    code = (
        "import multiprocessing, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "lock = multiprocessing.get_context('spawn').Lock(); print(lock._semlock.name, flush=True); time.sleep(60)"
    )
    marks = {RUN_ID: run_id, ROLE: Role.ROLLOUT, RANK: "1"}
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ | marks, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        semaphore = Path(f"/dev/shm/sem.{process.stdout.readline().decode().strip().removeprefix('/')}")
        assert semaphore.exists()
        assert len(run_processes(run_id)) == 2
        if ends == "rank":
            assert end_rank(run_id, RankId(Role.ROLLOUT, 1), timeout_s=10.0) == []
        else:
            reap(run_id, kill_after_s=0.2)
        assert run_processes(run_id) == []
        assert not semaphore.exists()


def test_the_end_of_a_run_leaves_the_semaphores_of_this_process_to_its_own_resource_tracker(run_id: str) -> None:
    code = (
        "import multiprocessing; from rl_safe_workers.reaping.processes import reap\n"
        "lock = multiprocessing.get_context('spawn').Lock(); print(lock._semlock.name)\n"
        f"reap('{run_id}', kill_after_s=0.2); another = multiprocessing.get_context('spawn').Lock()"
    )
    marks = {RUN_ID: run_id, ROLE: Role.ROLLOUT, RANK: "1"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=os.environ | marks, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stderr == ""
    assert not Path(f"/dev/shm/sem.{ended.stdout.strip().removeprefix('/')}").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to start a process of another user")
def test_another_users_process_with_a_forged_mark_is_left_alone(run_id: str) -> None:
    command = ["/bin/sleep", "60"]
    with subprocess.Popen(command, env=os.environ | {RUN_ID: run_id}, user=65534) as process:
        assert run_processes(run_id) == []
        reap(run_id, kill_after_s=0.2)
        assert process.poll() is None
        process.kill()
