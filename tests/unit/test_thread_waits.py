"""A rank that waits for a thread of its own process, or for somebody's input: the verdict says so."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_safe_workers.diagnostics.inquiry import RankProcess, ask_ranks
from rl_safe_workers.diagnostics.proc_facts import descendants_of, look_at
from rl_safe_workers.diagnostics.thread_waits import where_is
from rl_safe_workers.ranks import trainer_id

REPOSITORY = Path(__file__).parents[2]
RANK = """
import concurrent.futures, fcntl, pdb, queue, subprocess, sys, threading, time
from pathlib import Path
from rl_safe_workers.diagnostics.answering import answer_when_asked
from rl_safe_workers.ranks import trainer_id

first, second, begun, rows = threading.Lock(), threading.Lock(), threading.Event(), queue.Queue()

def publish():
    with first:
        begun.set()
        with second: pass  # line 12

def sleep():
    time.sleep(300)

def lock():
    with second:
        threading.Thread(target=publish, daemon=True, name="publisher").start()
        begun.wait()
        tell()
        with first: pass  # line 22

def nest():
    both.wait(), nested.release()  # else the pool may take the inner task before the second outer one
    return pool.submit(sleep).result()  # line 26

def pool_is_full():
    tasks = [pool.submit(nest) for _ in range(2)]
    nested.acquire(), nested.acquire(), tell()
    tasks[0].result()  # line 31

def get():
    tell()
    rows.get()  # line 35

def debug():
    tell()
    pdb.set_trace()
    return 1  # line 40

def ask():
    tell()
    input()  # line 44

def tool():
    tool = subprocess.Popen([sys.executable, "-c", "print('x' * 1_000_000)"], stdout=subprocess.PIPE)
    tell()
    tool.wait()  # line 49

def tell():
    print("ready", flush=True)

both, nested = threading.Barrier(2), threading.Semaphore(0)
pool = concurrent.futures.ThreadPoolExecutor(2)
answer_when_asked(Path(sys.argv[1]), trainer_id(1))
threading.Thread(target=sleep, daemon=True, name="heartbeat").start()
globals()[sys.argv[2]]()
"""


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s, "the rank does not wait"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("work", "call", "said"),
    [
        ("lock", "futex", r"22 \(lock\), and its thread publisher is at waits\.py:12 \(publish\)"),
        ("pool_is_full", "futex", r"31 \(pool_is_full\), and 2 of its threads are at waits\.py:26 \(nest\)"),
        ("get", "futex", r"35 \(get\)"),
        ("debug", "read", r"40 \(debug\), and waits for input in a debugger"),
        ("ask", "read", r"44 \(ask\), and waits for its standard input"),
        (
            "tool",
            "write",
            r"49 \(tool\), and waits for its process \d+, which runs \S+ -c print\('x' \* 1_000_000\), and waits in "
            r"write of a full pipe, which process \d+ does not read",
        ),
    ],
)
def test_a_wait_within_the_process_is_told_with_what_it_is_for(
    work: str, call: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "waits.py").write_text(RANK)
    command = [sys.executable, "waits.py", str(tmp_path), work]
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=tmp_path, env=variables, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        until(lambda: call in [look_at(pid).system_call for pid in (process.pid, *descendants_of(process.pid))])
        rank = RankProcess(rank_id=trainer_id(1), pid=process.pid, folder=tmp_path)
        (found,) = ask_ranks(lambda: [rank], patience_s=30.0).ranks
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert re.fullmatch(rf"is at waits\.py:{said}", found.where()), found.where()


def test_a_thread_of_this_process_is_told_with_its_line() -> None:
    begun, asked = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        asked.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    assert re.fullmatch(r"it is at \S*test_thread_waits\.py:\d+ \(wait\)", where_is(thread))
    asked.set()
    thread.join()
    assert where_is(thread) == ""
