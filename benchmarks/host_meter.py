"""Meters calls of a host framework in stock runs and in ours: records seconds and memory, causes faults, takes turns.

A glue module for each host names the methods. The environment variable `FOLDER` names a folder that the processes of a
job share. Each process writes its calls there, one JSON object per line.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import inspect
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

FOLDER = "RL_SAFE_METER"
"""Environment variable: the folder of the records. Without it nothing is metered."""
FAULT = "RL_SAFE_METER_FAULT"
"""Environment variable: ``NAME:CALL:RANK:HOW``. The fault happens at the beginning of a call; calls count from 0. HOW
is ``raise``, ``kill``, ``stop`` (the process is stopped) or ``hang`` (it sleeps, and ends when it is asked to)."""
TURNS = "RL_SAFE_METER_TURNS"
"""Environment variable: ``FOLDER:NAME:OTHER``. This job is NAME, and takes turns with the job OTHER. ``{rank}`` in
FOLDER stands for the process's rank: then each rank takes turns with the same rank of the other job."""
_TURNS_FILE = "turns"
FAULT_NAME = "fault"
"""Name of the record that a process writes before it ends or stops itself."""
_HOW = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_HANG_S = 3600.0
_POLL_S, _OTHER_STARTS_WITHIN_S = 0.002, 420.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a watched method on one rank. Memory is in bytes, after the call; None and 0 if it was left out."""

    name: str
    call: int
    rank: int
    pid: int
    started_s: float
    """Seconds since the epoch."""
    seconds: float
    """Seconds of the call, including the GPU work that it has queued."""
    outside_torch: int | None
    """Device memory of the process that torch's allocator does not hold; None if NVML does not report it."""
    torch_reserved: int
    gc_s: float = 0.0
    """Seconds of the call that Python's garbage collector took."""


def watch(owner: type | ModuleType, method: str, name: str, *, memory: bool = True) -> None:
    """Replaces a method of a class, or a function of a module, by one that records each call.

    Coroutine functions stay coroutine functions.

    Args:
        owner: The class or module.
        method: Name of the method or function.
        name: Name of the calls in the records.
        memory: False to leave out the memory. Reading it takes milliseconds. If the call is inside of another watched
            call, these would count as part of that one.
    """
    if FOLDER not in os.environ:
        return
    stock = inspect.getattr_static(owner, method)
    plain = inspect.unwrap(getattr(owner, method))
    number = iter(range(10**9))

    if inspect.iscoroutinefunction(plain):

        @functools.wraps(stock)
        async def recorded(*args: Any, **kwargs: Any) -> Any:
            with _recording(name, next(number), memory=memory):
                return await stock(*args, **kwargs)
    else:

        @functools.wraps(stock)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with _recording(name, next(number), memory=memory):
                return stock(*args, **kwargs)

    setattr(owner, method, recorded)


def take_turns(owner: type, first: str, last: str | None = None, *, left_out: int = 0) -> None:
    """Lets two jobs alternate. A turn begins with a call of one method, and ends when a call of another returns.

    The first turn waits until the other job of `TURNS` also comes to its first turn. Nobody waits for a job that has
    ended.

    Args:
        owner: The class or module of both methods.
        first: Name of the method that begins a turn.
        last: Name of the method that ends the turn; None: the same method.
        left_out: Number of first calls that take no turns, so that both jobs may warm up at the same time.
    """
    if TURNS not in os.environ:
        return
    folder, mine, other = os.environ[TURNS].replace("{rank}", os.environ.get("RANK", "0")).split(":")
    turns = _Turns(Path(folder), mine, other)
    before, after = getattr(owner, first), getattr(owner, last or first)

    begun, ended = itertools.count(), itertools.count()

    @functools.wraps(before)
    def begin(*args: Any, **kwargs: Any) -> Any:
        if next(begun) >= left_out:
            turns.begin()
        return before(*args, **kwargs)

    setattr(owner, first, begin)
    after = getattr(owner, last or first)

    @functools.wraps(after)
    def end(*args: Any, **kwargs: Any) -> Any:
        try:
            return after(*args, **kwargs)
        finally:
            if next(ended) >= left_out:
                turns.end()

    setattr(owner, last or first, end)


def leave_first_turn_to(folder: Path, *, had_the_last: str) -> None:
    """Makes a folder for turns and fixes which job begins, because the ranks of one job wait for each other.

    Args:
        folder: The folder, which must not exist.
        had_the_last: Name of the job that does not begin.
    """
    folder.mkdir()
    (folder / _TURNS_FILE).write_text(f"{had_the_last}\n")


@contextmanager
def no_turns(folder: Path) -> Iterator[None]:
    """Prevents all jobs from beginning a turn while the body runs."""
    with (folder / _TURNS_FILE).open("a") as turns:
        fcntl.flock(turns, fcntl.LOCK_EX)
        yield


def read_calls(folder: Path) -> list[Call]:
    """Returns all records of a job, in the order of their start. Skips a line that a killed process has cut off."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().split("\n")[:-1]]
    return sorted((Call(**json.loads(line)) for line in lines), key=lambda call: call.started_s)


def slowest(calls: Iterable[Call], *, net: bool = False) -> list[float]:
    """Returns the seconds of each call on its slowest rank, in their order.

    Args:
        calls: The calls of one name, on all ranks.
        net: True to subtract the seconds of garbage collection of the rank that collected longest in the call. If no
            rank waited for it, that is too much.
    """
    seconds: dict[int, float] = {}
    collected: dict[int, float] = {}
    for call in calls:
        seconds[call.call] = max(seconds.get(call.call, 0.0), call.seconds)
        collected[call.call] = max(collected.get(call.call, 0.0), call.gc_s)
    return [seconds[number] - (collected[number] if net else 0.0) for number in sorted(seconds)]


def append(call: Call, file: Path) -> None:
    """Adds a record to a file that no other process writes."""
    with file.open("a") as records:
        records.write(json.dumps(asdict(call)) + "\n")


@contextmanager
def _recording(name: str, number: int, *, memory: bool) -> Iterator[None]:
    rank = int(os.environ.get("RANK", "-1"))
    if os.environ.get(FAULT, "").startswith(f"{name}:{number}:{rank}:"):
        _fail(os.environ[FAULT].rpartition(":")[2], number, rank)
    _synchronize()
    began = _Times()
    yield
    _synchronize()
    _write(name, number, rank, began, memory=memory)


def _fail(how: str, number: int, rank: int) -> None:
    _write(FAULT_NAME, number, rank, _Times())
    if how == "raise":
        raise RuntimeError(f"the benchmark makes rank {rank} fail here")
    if how == "hang":
        time.sleep(_HANG_S)
        return
    os.kill(os.getpid(), _HOW[how])


class _Collections:
    """Sums up the seconds that Python's garbage collector takes in this process."""

    def __init__(self) -> None:
        self.seconds, self._began_s = 0.0, 0.0
        gc.callbacks.append(self._note)

    def _note(self, moment: str, about: dict[str, int]) -> None:
        if moment == "start":
            self._began_s = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began_s


@functools.cache
def _collections() -> _Collections:
    return _Collections()


class _Times:
    """A moment on several clocks."""

    def __init__(self) -> None:
        self.unix_s, self.elapsed_s, self.gc_s = time.time(), time.perf_counter(), _collections().seconds


def _write(name: str, number: int, rank: int, began: _Times, *, memory: bool = True) -> None:
    now = _Times()
    reserved = torch.cuda.memory_reserved() if memory and torch.cuda.is_initialized() else 0
    read = _reader() if memory else None
    call = Call(
        name=name,
        call=number,
        rank=rank,
        pid=os.getpid(),
        started_s=began.unix_s,
        seconds=now.elapsed_s - began.elapsed_s,
        gc_s=now.gc_s - began.gc_s,
        outside_torch=None if read is None else read() - reserved,
        torch_reserved=reserved,
    )
    append(call, Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl")


def _reader() -> Callable[[], int] | None:
    if not torch.cuda.is_initialized():
        return None
    from rl_safe_workers.platforms.nvml_memory import process_memory

    return process_memory(torch.device("cuda", torch.cuda.current_device()))


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class _Turns:
    """A lock of two jobs. The job that had the last turn waits as long as the other job runs."""

    def __init__(self, folder: Path, mine: str, other: str) -> None:
        self._mine, self._other = folder / f"{mine}.pid", folder / f"{other}.pid"
        self._turns = (folder / _TURNS_FILE).open("a+")

    def begin(self) -> None:
        """Waits for this job's turn."""
        self._mine.write_text(str(os.getpid()))
        deadline = time.monotonic() + _OTHER_STARTS_WITHIN_S
        while not self._other.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._other.stem} did not come to its first turn in {_OTHER_STARTS_WITHIN_S:g} s")
            time.sleep(_POLL_S)
        while True:
            fcntl.flock(self._turns, fcntl.LOCK_EX)
            self._turns.seek(0)
            had_the_last = self._turns.read().endswith(f"{self._mine.stem}\n")
            if not had_the_last or not runs(int(self._other.read_text())):
                return
            fcntl.flock(self._turns, fcntl.LOCK_UN)
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Leaves the turn to the other job."""
        self._turns.write(f"{self._mine.stem}\n")
        self._turns.flush()
        fcntl.flock(self._turns, fcntl.LOCK_UN)


def runs(pid: int) -> bool:
    """Returns True while a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
