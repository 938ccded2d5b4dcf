from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from rl_safe_workers.driver.outputs import process_memory
from rl_safe_workers.driver.outputs.process_memory import MemorySampler

MIB = 2**20
WAIT = "print('ready', flush=True); sys.stdin.read()"
HOLD = f"import sys; held = bytearray(b'x') * {64 * MIB}; {WAIT}"
MAP = "import mmap, sys; f = open(sys.argv[1], 'r+b'); held = mmap.mmap(f.fileno(), 0); held.find(b'x'); " + WAIT


@contextmanager
def running(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A child process that has done its work and waits for its standard input to close."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process


def test_a_sample_counts_descendants() -> None:
    sampler = MemorySampler()
    with running(HOLD):
        with_child = sampler.sample()
    assert with_child - sampler.sample() > 60 * MIB
    assert sampler.peak_bytes == with_child


def test_memory_that_two_processes_share_counts_once(tmp_path) -> None:
    (tmp_path / "shared").write_bytes(bytes(64 * MIB))
    sampler = MemorySampler()
    with running(MAP, str(tmp_path / "shared")):
        one = sampler.sample()
        with running(MAP, str(tmp_path / "shared")):
            both = sampler.sample()
    assert both - one < 40 * MIB


def test_the_peak_is_the_largest_sum(monkeypatch) -> None:
    sampler, sums = MemorySampler(), [6, 4]
    monkeypatch.setattr(sampler, "_measure", lambda: sums.pop(0))
    assert (sampler.sample(), sampler.sample()) == (6, 4)
    assert sampler.peak_bytes == 6


def test_the_thread_keeps_the_peak_of_what_is_gone() -> None:
    with MemorySampler(interval_s=0.01) as sampler:
        with running(HOLD):
            seen = sampler.samples
            wait_for(lambda: sampler.samples >= seen + 2)
        assert sampler.peak_bytes - sampler.sample() > 60 * MIB


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_start_and_stop_are_idempotent() -> None:
    sampler = MemorySampler()
    sampler.stop()
    sampler.start()
    thread = sampler._thread
    sampler.start()
    assert sampler._thread is thread
    sampler.stop()
    sampler.stop()
    assert thread is not None
    assert not thread.is_alive()


def test_a_process_that_vanishes_while_it_is_read_is_left_out(monkeypatch) -> None:
    sampler = MemorySampler()
    read = sampler._memory_bytes

    def vanish(process: psutil.Process) -> int:
        if process.pid != sampler._root.pid:
            raise psutil.NoSuchProcess(process.pid)
        return read(process)

    monkeypatch.setattr(sampler, "_memory_bytes", vanish)
    with running(HOLD):
        assert sampler.sample() > 0


def test_rss_stands_in_for_a_pss_that_cannot_be_read_and_says_so_once(monkeypatch, caplog) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "memory_full_info", refuse)
    sampler = MemorySampler()
    with caplog.at_level(logging.WARNING):
        assert sampler.sample() > 0
        sampler.sample()
    assert caplog.text.count("RSS counts instead") == 1


def test_expensive_samples_move_apart(monkeypatch) -> None:
    sampler = MemorySampler(interval_s=0.0)

    def burn() -> int:
        end_s = time.thread_time() + 0.02
        while time.thread_time() < end_s:
            pass
        return 1

    monkeypatch.setattr(sampler, "_measure", burn)
    started_s = time.monotonic()
    with sampler:
        wait_for(lambda: sampler.samples >= 3)
        elapsed_s = time.monotonic() - started_s
    assert elapsed_s >= 2 * 0.02 / process_memory.MAX_CPU_SHARE
