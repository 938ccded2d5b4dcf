"""Why a process has ended: from the kernel's log, its own log, its exit code, its control group and its host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rl_safe_workers.diagnostics import endings
from rl_safe_workers.diagnostics.answering import note_kills
from rl_safe_workers.diagnostics.diagnosis import diagnose, diagnose_answers
from rl_safe_workers.diagnostics.endings import (
    Ending,
    KernelLine,
    KernelLog,
    Signs,
    ending_by_ray,
    ending_of,
    joined,
    read_kernel_log,
)
from rl_safe_workers.diagnostics.inquiry import Answers, RankProcess, ask_ranks
from rl_safe_workers.diagnostics.log_lines import ADVICE, Fault, fault_of_kernel_line
from rl_safe_workers.diagnostics.proc_facts import DISK_SLEEP, look_at
from rl_safe_workers.diagnostics.rank_files import kills_file
from rl_safe_workers.diagnostics.stacks import Stack
from rl_safe_workers.errors import Awaited, Died, PhaseTimeoutError, RankError
from rl_safe_workers.frames import Frame
from rl_safe_workers.platforms import host_memory
from rl_safe_workers.ranks import trainer_id, trainer_ids
from rl_safe_workers.root_cause import report_from_text, report_of, report_to_text

PID = 4711
NOW_S = 1.8e9
OOM = (
    "Memory cgroup out of memory: Killed process 4711 (python) total-vm:25165824kB, anon-rss:12897485kB, "
    "file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:2024kB oom_score_adj:0"
)
"""As mm/oom_kill.c of Linux 6.1 writes it."""
SEGFAULT = "python[4711]: segfault at 0 ip 00007fcbda3b95d0 sp 00007ffc5533f000 error 4 in libpython3.11.so.1.0[1b95d0]"
PROTECTION = "traps: python[4711] general protection fault ip:7f07378abda0 sp:5581557480a0 error:0 in libpython3.11.so"
"""Both as Linux 6.1 has written them for a process of ours."""
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID_OF_PROCESS = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, intr 10000000. MMU Fault"
"""Both as NVIDIA's list of Xid errors shows them."""
WATCHDOG = """\
[rank1]:[E1125 00:03:07.5 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(x)
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)
*** SIGABRT received at time=1795578576 on cpu 0 ***
Fatal Python error: Aborted
"""
ILLEGAL = """\
terminate called after throwing an instance of 'c10::AcceleratorError'
  what():  CUDA error: an illegal memory access was encountered
Fatal Python error: Aborted
"""


def kernel(*lines: str, at_s: float = NOW_S) -> Signs:
    told = [KernelLine(at_s, line, found) for line in lines if (found := fault_of_kernel_line(line)) is not None]
    return Signs(kernel=KernelLog(told), shared_free_bytes=2**30)


def ending(signs: Signs, exit_code: int | None = None, kills: Path | None = None) -> Ending:
    return ending_of(PID, signs, exit_code=exit_code, kills=kills, noted_s=NOW_S)


@pytest.mark.parametrize(
    ("line", "exit_code", "fault", "said"),
    [
        (OOM, -9, Fault.OOM_KILL, "OOM kill: the kernel killed python, which had 12.3 GiB"),
        (SEGFAULT, None, Fault.SIGNAL, f"signal segfault: {SEGFAULT}"),
        (PROTECTION, None, Fault.SIGNAL, f"signal general protection fault: {PROTECTION}"),
        (XID_OF_PROCESS, None, Fault.XID, f"GPU fault (Xid) 31: {XID_OF_PROCESS}"),
        (XID, None, Fault.XID, f"GPU fault (Xid) 79: {XID}"),
        (OOM.replace("4711", "4712"), -9, Fault.SILENT_END, None),
        (SEGFAULT.replace("4711", "14711"), None, Fault.SILENT_END, None),
    ],
)
def test_the_kernels_log_tells_of_the_process(line: str, exit_code: int | None, fault: Fault, said: str | None) -> None:
    found = ending(kernel("usb 1-1: new device", line), exit_code)
    assert found.fault is fault
    assert said is None or str(found) == said


def test_old_lines_of_the_kernel_are_about_another_process() -> None:
    assert not ending(kernel(OOM, XID, at_s=NOW_S - 3600)).is_known


@pytest.mark.parametrize(
    ("head", "fault", "detail", "aborted_in"),
    [
        ("Aborted\n\nThread", Fault.ABORTED, "SIGABRT", "all_gather"),
        ("Aborted\n\nCurrent thread", Fault.ABORTED, "SIGABRT", ""),
        ("Segmentation fault\n\nThread", Fault.SIGNAL, "SIGSEGV", ""),
    ],
)
def test_the_last_stacks_of_a_process_tell_its_end(head: str, fault: Fault, detail: str, aborted_in: str) -> None:
    stacks = f"""Fatal Python error: {head} 0x00007f9eecbf9b80 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3000 in all_gather
  File "/srv/mine.py", line 7 in gather_scores
"""
    found = ending_of(PID, kernel(), exit_code=None, kills=None, noted_s=NOW_S, last_stacks=stacks)
    assert (found.fault, found.detail, found.aborted_in) == (fault, detail, aborted_in)
    assert found.place == "/srv/mine.py:7 (gather_scores)"


def test_the_last_stacks_tell_the_line_of_the_thread_that_got_the_signal() -> None:
    stacks = """Fatal Python error: Segmentation fault

Thread 0x01 (most recent call first):
  File "/srv/mine.py", line 1 in log

Current thread 0x02 (most recent call first):
  File "/srv/mine.py", line 2 in tokenize

Thread 0x03 (most recent call first):
  File "/srv/mine.py", line 3 in main
"""
    found = ending_of(PID, kernel(), exit_code=None, kills=None, noted_s=NOW_S, last_stacks=stacks)
    assert (str(found), found.place) == (
        "signal SIGSEGV: faulthandler says Segmentation fault",
        "/srv/mine.py:2 (tokenize)",
    )


@pytest.mark.parametrize(
    ("exit_code", "fault", "said"),
    [
        (-11, Fault.SIGNAL, "signal SIGSEGV: its exit status says so"),
        (-6, Fault.ABORTED, "abort SIGABRT: its exit status says so"),
        (-15, Fault.ASKED, "asked to end SIGTERM: its exit status says so"),
        (3, Fault.EXIT, "exit code 3: its exit status says so"),
    ],
)
def test_an_exit_code_tells_the_end(exit_code: int, fault: Fault, said: str) -> None:
    found = ending(kernel(), exit_code)
    assert (found.fault, str(found)) == (fault, said)


@pytest.mark.parametrize(("exit_code", "sent"), [(-9, "it got SIGKILL from an unknown sender, "), (None, "")])
def test_what_nobody_knows_is_said_with_the_reason(exit_code: int | None, sent: str) -> None:
    assert str(ending(kernel(), exit_code)) == (
        f"why is not known, because {sent}the kernel's log does not name it, its control group does not count OOM "
        "kills, and no log of its own is here"
    )
    hidden = Signs(kernel=KernelLog([], "the kernel's log cannot be read (Permission denied)"), shared_free_bytes=None)
    assert "the kernel's log cannot be read (Permission denied)" in str(ending(hidden, exit_code))


@pytest.mark.parametrize(
    ("log", "fault", "said"),
    [
        ("*** SIGSEGV received at time=1795578945 on cpu 1 ***\n", Fault.SIGNAL, "SIGSEGV received"),
        (
            '!!!!!!! Segfault encountered !!!!!!!\n  File "<unknown>", line 0, in f\n',
            Fault.SIGNAL,
            "Segfault encountered",
        ),
        ("Fatal Python error: Bus error\n", Fault.SIGNAL, "Bus error"),
        (WATCHDOG, Fault.ABORTED, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"),
        (ILLEGAL, Fault.DEVICE_ERROR, "an illegal memory access"),
        ("Traceback (most recent call last):\nImportError: no flash_attn\n", Fault.IMPORT, "no flash_attn"),
        (":job_id:01000000\n:actor_name:A\n", Fault.SILENT_END, "its log ends without a word"),
    ],
)
def test_the_log_of_a_worker_tells_its_end(log: str, fault: Fault, said: str, tmp_path: Path) -> None:
    (tmp_path / f"worker-65-01000000-{PID}.err").write_text(log)
    (tmp_path / "worker-66-01000000-47110.err").write_text("Fatal Python error: Aborted\n")
    found = ending(kernel()._replace(logs=tmp_path))
    assert found.fault is fault
    assert said in str(found)


def test_a_log_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / f"worker-65-01000000-{PID}.err").symlink_to(tmp_path)
    assert ", and its log cannot be read (" in str(ending(kernel()._replace(logs=tmp_path)))


def test_a_bus_error_with_full_shared_memory_is_told_apart() -> None:
    signs = kernel()._replace(shared_free_bytes=4096)
    assert ending(signs, -signal.SIGBUS).fault is Fault.SHARED_MEMORY
    assert "4096 bytes are left" in str(ending(signs, -signal.SIGBUS))
    assert ending(signs, -signal.SIGSEGV).fault is Fault.SIGNAL


COUNTERS = [
    ("0::/job", "job/memory.events", "low 0\nmax 7\noom 1\noom_kill {}\n"),
    ("4:memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    ("0::/outside/of/the/container", "memory.events", "oom_kill {}\n"),
]


@pytest.mark.parametrize(("group", "file", "text"), COUNTERS)
def test_oom_kills_since_the_start_count(
    group: str, file: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text(f"{group}\n")
    counter = tmp_path / "cgroup" / file
    counter.parent.mkdir(parents=True)
    monkeypatch.setattr(host_memory, "OWN_CGROUP", tmp_path / "own")
    for module in (host_memory, endings):
        monkeypatch.setattr(module, "CGROUP", tmp_path / "cgroup")
    counter.write_text(text.format(2))
    note_kills(tmp_path, trainer_id(1))
    kills = tmp_path / kills_file(trainer_id(1))
    assert json.loads(kills.read_text()) == {str(counter): 2}
    assert "its control group counts no OOM kill" in str(ending(kernel(), -9, kills))
    counter.write_text(text.format(3))
    found = ending(kernel(OOM.replace("4711", "9")), -9, kills)
    assert str(found) == (
        "OOM kill: its control group counts 1 kill since it began; the last in the kernel's log: "
        "the kernel killed python, which had 12.3 GiB"
    )
    assert ending(kernel(), -11, kills).fault is Fault.SIGNAL  # the kernel kills by SIGKILL


@pytest.mark.parametrize("text", ["[]", "no JSON", '{"/etc/passwd": 0}', '{"/sys/fs/cgroup/../../../etc/passwd": 0}'])
def test_notes_that_are_not_ours_count_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "kills").write_text(text)
    assert "does not count" in str(ending(kernel(), -9, tmp_path / "kills"))


DIED = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"{DIED}Worker exits unexpectedly. Worker exits with an exit code 3.", Fault.EXIT),
        (
            f"{DIED}Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a SIGTERM.",
            "asked",
        ),
        (f"{DIED}Worker exits by an user request. Worker exits with an exit code 0. exit_actor() is called.", "asked"),
        ("The actor is dead because it was killed by `ray.kill`.", "asked"),
        (
            "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 46) "
            "was 4.69GB used / 23.54GB limit (0.199169), which exceeds the memory usage threshold of 0.190829.",
            Fault.RAY_MEMORY,
        ),
        ("The actor died because its node has died. Node Id: 44\n\tthe actor's node was terminated", Fault.NODE_LOST),
        (f"{DIED}Worker unexpectedly exits with a connection error code 2. End of file.", None),
    ],
)
def test_rays_words_are_told_apart(text: str, fault: Fault | str | None) -> None:
    """The texts are Ray 2.60.0's; those but the last two but one were seen here."""
    found = ending_by_ray(text)
    assert (None if found is None else found.fault) == (Fault.ASKED if fault == "asked" else fault)
    assert found is None or (str(found).count("Ray says: ") == 1 and "\n" not in str(found))


def test_the_more_telling_source_counts() -> None:
    by_ray, monitor = (Ending(fault=fault, said="Ray") for fault in (Fault.EXIT, Fault.RAY_MEMORY))
    signalled, silent = (Ending(fault=fault, said="machine") for fault in (Fault.SIGNAL, Fault.SILENT_END))
    assert joined(by_ray, signalled) is signalled
    assert joined(by_ray, silent) is by_ray
    assert joined(by_ray, None) is by_ray
    assert joined(monitor, signalled) is monitor
    assert joined(None, silent) is silent
    assert joined(None, None) is None


def test_a_kernel_log_that_may_not_be_read_is_a_complaint(tmp_path: Path) -> None:
    assert read_kernel_log(tmp_path / "none").complaint == "the kernel's log cannot be read (No such file or directory)"


def test_records_of_the_kernel_are_read(tmp_path: Path) -> None:
    uptime_us = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    (tmp_path / "kmsg").write_text(f"6,339,{uptime_us},-;{OOM}\n SUBSYSTEM=x\n")  # a device gives one at a time
    (line,) = read_kernel_log(tmp_path / "kmsg").lines
    assert line.text == OOM
    assert abs(line.at_s - time.time()) < 5


def gone(why: Ending | None) -> RankProcess:
    return RankProcess(rank_id=trainer_id(1), pid=PID, status="gone", never_ends=True, ending=why)


def test_the_verdict_says_why_and_what_to_do() -> None:
    why = Ending(fault=Fault.OOM_KILL, said="the kernel killed python, which had 12.3 GiB")
    found = diagnose_answers(lambda _: Answers(ranks=[gone(why)]), patience_s=1.0)
    assert found.verdict == "training rank 1 died: OOM kill: the kernel killed python, which had 12.3 GiB"
    assert (found.fault, found.advice) == (Fault.OOM_KILL, ADVICE[Fault.OOM_KILL])


def test_what_the_host_knows_of_a_rank_without_a_process_is_said() -> None:
    lost = Ending(fault=Fault.NODE_LOST, said="Ray says: its node has died")
    dead = RankError(rank_id=trainer_id(1), phase="train", cause=Died(), text="", trace="", raised_at=1.0)
    found = diagnose_answers(
        lambda _: Answers(),
        patience_s=1.0,
        reports={trainer_id(1): dead},
        phase="train",
        endings=lambda: {trainer_id(1): lost},
    )
    assert found.verdict == "training rank 1 died in phase train: node lost: Ray says: its node has died"
    assert found.fault is Fault.NODE_LOST


def test_the_end_of_a_rank_that_others_wait_for_is_said() -> None:
    why = Ending(fault=Fault.SIGNAL, said="its exit status says so", detail="SIGSEGV")
    waiting = RankProcess(rank_id=trainer_id(0), pid=1, status="sleeping", stack=WAITS)
    left = RankProcess(rank_id=trainer_id(1), pid=2, status="gone", exit_code=0)
    awaited = Awaited("the trainers", frozenset(trainer_ids(range(2))))
    late = PhaseTimeoutError(phase="train", awaited=awaited, missing=[trainer_id(1)], waited_s=9.0, setting="x")
    found = diagnose_answers(
        lambda _: Answers(ranks=[waiting, left]),
        patience_s=1.0,
        reports={trainer_id(0): late},
        endings=lambda: {trainer_id(1): why},
    )
    assert found.verdict.endswith(
        "has ended with exit code 0; training rank 1: signal SIGSEGV: its exit status says so"
    )


def test_what_a_rank_has_said_itself_counts_before_its_end() -> None:
    why = Ending(fault=Fault.EXIT, said="its exit status says so", detail="1")
    for error, fault in (
        (ValueError("no"), None),
        (OSError(28, "No space left on device"), Fault.NO_SPACE),
        (MemoryError("no"), Fault.DEVICE_MEMORY),
        (ModuleNotFoundError("no"), Fault.IMPORT),
    ):
        own = report_from_text(report_to_text(report_of(error, trainer_id(1), "save")))
        ranks = Answers(ranks=[gone(why)], reports={trainer_id(1): own})
        found = diagnose_answers(lambda _, ranks=ranks: ranks, patience_s=1.0)
        assert (
            found.verdict == f"training rank 1 failed in phase save at an unknown line: {type(error).__name__}: {error}"
        )
        assert found.fault is fault


def ended(program: str) -> RankProcess:
    process = subprocess.Popen([sys.executable, "-c", program])
    process.wait(timeout=30)
    return RankProcess(rank_id=trainer_id(1), pid=process.pid, poll=process.poll)


@pytest.mark.parametrize(
    ("program", "fault", "said"),
    [
        ("import sys; sys.exit(3)", Fault.EXIT, "training rank 1 has ended with exit code 3: exit code 3: "),
        ("import ctypes; ctypes.string_at(0)", Fault.SIGNAL, "training rank 1 was killed by SIGSEGV: signal "),
        ("import os; os.abort()", Fault.ABORTED, "training rank 1 was killed by SIGABRT: abort SIGABRT: "),
    ],
)
def test_a_real_end_is_told_from_others(program: str, fault: Fault, said: str) -> None:
    found = diagnose([ended(program)], patience_s=5.0)
    assert found.fault is fault
    assert found.verdict.startswith(said)


def test_a_real_sigkill_is_not_known() -> None:
    found = diagnose([ended("import os; os.kill(os.getpid(), 9)")], patience_s=5.0)
    assert (found.fault, found.verdict) == (None, "training rank 1 was killed by SIGKILL")
    assert found.advice.startswith("why is not known, because ")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    (tmp_path / "shm").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path / "shm")]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounts are not allowed here")
    yield tmp_path / "shm"
    subprocess.run(["umount", str(tmp_path / "shm")], check=True)


def test_a_real_bus_error_by_full_shared_memory_is_told_apart(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "_SHARED_MEMORY", small)
    program = (
        f"import mmap; f = open({str(small / 'segment')!r}, 'w+b'); f.truncate(2**22); m = mmap.mmap(f.fileno(), 0)"
    )
    found = diagnose([ended(f"{program}; m[:] = bytes(2**22)")], patience_s=5.0)
    assert found.verdict == (
        "training rank 1 was killed by SIGBUS: /dev/shm is full: SIGBUS (its exit status says so), and 0 bytes are left"
    )
    assert found.fault is Fault.SHARED_MEMORY


WAITS = Stack(
    frames=[Frame(file="torch/distributed/distributed_c10d.py", line=1, function="all_reduce")],
    is_in_a_call=True,
    op="all_reduce",
)
VFORK = "import ctypes, signal\nif ctypes.PyDLL(None).vfork() == 0:\n    signal.pause()\n"
"""The parent sleeps in the kernel until the child ends; no signal but SIGKILL wakes it."""


def test_a_process_that_sleeps_in_the_kernel_is_told_with_its_wait() -> None:
    process = subprocess.Popen([sys.executable, "-c", VFORK])
    try:
        deadline_s = time.monotonic() + 30
        while look_at(process.pid).state not in DISK_SLEEP or not psutil.Process(process.pid).children():
            assert time.monotonic() < deadline_s, "the process does not sleep in the kernel"
            time.sleep(0.01)
        ranks = [RankProcess(rank_id=trainer_id(1), pid=process.pid)]
        (found,) = ask_ranks(lambda: ranks, patience_s=5.0).ranks
        assert ", disk-sleep: waits in the kernel (" in found.where()
        waiting = RankProcess(rank_id=trainer_id(0), pid=1, status="sleeping", stack=WAITS)
        judged = diagnose_answers(lambda _: Answers(ranks=[waiting, found]), patience_s=1.0)
        assert found.where() in judged.verdict
        assert (judged.fault, judged.advice) == (Fault.ASLEEP, ADVICE[Fault.ASLEEP])
    finally:
        for child in psutil.Process(process.pid).children():
            os.kill(child.pid, signal.SIGKILL)
        process.kill()
        process.wait()
