"""Runs a function on several gloo ranks, each a real process, and brings back what each returned or raised."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

PRELOAD = ["tests.distributed.preload"]
"""Imported once, in the process that all ranks fork from, so that a test does not pay for imports again."""
BUSY = 3.0
"""Ranks may take that many times longer on a busy machine. The limit only ends ranks that hang."""
LOOK_S = 1.0
"""Time between two looks for ranks that are stopped. Nobody continues such a rank, so a test does not wait for it."""
LINGER_S = 0.2
"""How long a rank that raised still lives, as an actor would: others may be about to finish what it took part in."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank: a value or an error. It has neither if the rank was stopped, or ran at the deadline."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    finished: bool = True


def _child(function: Callable[..., Any], rank: int, args: tuple[Any, ...], pipe: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send(Outcome(rank=rank, value=function(rank, *args)))
        # A rank that has done its part may be the host of a store that others still use: it ends when all have.
        with contextlib.suppress(EOFError):
            pipe.recv()
    except BaseException as error:
        try:
            pipe.send(Outcome(rank=rank, error=error, trace=traceback.format_exc()))
        except Exception:
            pipe.send(Outcome(rank=rank, error=RuntimeError(repr(error)), trace=traceback.format_exc()))
        pipe.poll(LINGER_S)
    pipe.close()
    # Groups that a failed rank left behind must not hold up its exit; nor may megatron-core's writers outlive it.
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(0)


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 120.0, ranks: list[int] | None = None
) -> list[Outcome]:
    """Calls ``function(rank, *args)`` in ``size`` processes and returns their outcomes by rank.

    A rank that has returned lives on until every other has returned, raised, died or been stopped; one that raised,
    for `LINGER_S`. A rank that still runs after ``BUSY * timeout_s`` is killed. So is one that is stopped when all
    others have ended. Its outcome says that it did not finish.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    processes, pipes = {}, {}
    for rank in ranks if ranks is not None else range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(function, rank, args, theirs))
        process.start()
        theirs.close()
        processes[rank] = process
        pipes[ours] = rank
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + BUSY * timeout_s
    pending = dict(pipes)
    while pending and (remaining := deadline - time.monotonic()) > 0:
        for pipe in wait(list(pending), timeout=min(remaining, LOOK_S)):
            rank = pending.pop(pipe)
            try:
                outcomes[rank] = pipe.recv()
            except EOFError:
                outcomes[rank] = Outcome(rank=rank, error=RuntimeError("the process died"))
        if pending and all(_is_stopped(processes[rank].pid) for rank in pending.values()):
            break
    for rank in pending.values():
        outcomes[rank] = Outcome(rank=rank, finished=False)
    for pipe in pipes:
        pipe.close()
    for process in processes.values():
        process.join(timeout=0.5 if pending else 5)
        if process.is_alive():
            process.kill()
            process.join()
    return [outcomes[rank] for rank in sorted(outcomes)]


def _is_stopped(pid: int | None) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def values(outcomes: list[Outcome]) -> list[Any]:
    """Returns every rank's value, or fails with the first rank's traceback that has one."""
    for outcome in outcomes:
        assert outcome.finished, f"rank {outcome.rank} did not finish"
        assert outcome.error is None, f"rank {outcome.rank}:\n{outcome.trace}"
    return [outcome.value for outcome in outcomes]
