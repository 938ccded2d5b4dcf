"""A process with ms-swift imported, which forks the ranks of jobs: importing takes longer than a job.

Reads one job in a line of JSON, and answers with one line. A rank runs ms-swift's own script to its end: with the hook
for exceptions, what is registered for the exit, and the status.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

warnings.simplefilter("ignore")


def preload() -> None:
    import swift.megatron.pipelines.export.export
    import swift.megatron.pipelines.train.pretrain
    import swift.megatron.pipelines.train.rlhf
    import swift.megatron.pipelines.train.sft
    import swift.megatron.trainers
    import swift.megatron.trainers.rollout_mixin  # noqa: F401
    import torch

    torch.set_num_threads(1)
    # As in tests/distributed/preload.py.
    gc.collect()
    gc.freeze()


def map_without_pools() -> None:
    """Lets a rank map its dataset itself: it is a fork of a process with threads, and a pool of its forks may hang."""
    from datasets import Dataset

    original = Dataset.map

    @functools.wraps(original)
    def map_here(dataset: Dataset, *args: Any, **kwargs: Any) -> Dataset:
        return original(dataset, *args, **{**kwargs, "num_proc": None})

    Dataset.map = map_here  # type: ignore[method-assign]


def script(command: str) -> str:
    import swift

    assert swift.__file__ is not None
    return str(Path(swift.__file__).parent / "cli" / "_megatron" / f"{command}.py")


def rank(job: dict[str, Any], number: int) -> NoReturn:
    size = job["ranks"]
    os.setsid()
    log = os.open(f"{job['folder']}/rank{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(job["folder"])
    os.environ.update(job["env"])
    os.environ.update(
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        NPROC_PER_NODE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job["port"]),
    )
    map_without_pools()
    path = script(job["command"])
    sys.argv = [path, *job["args"]]
    status = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        status = 1
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(job: dict[str, Any]) -> dict[str, Any]:
    started_s = time.monotonic()
    alive: dict[int, int] = {}
    for number in range(job["ranks"]):
        if (pid := os.fork()) == 0:
            rank(job, number)
        alive[pid] = number
    statuses: dict[int, int | None] = {}
    ended: dict[int, float] = {}
    ends_by_s = started_s + job["limit_s"]
    while alive and time.monotonic() < ends_by_s:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.02)
        elif pid in alive:
            ended[alive[pid]] = time.time()
            statuses[alive.pop(pid)] = os.waitstatus_to_exitcode(status)
            ends_by_s = min(ends_by_s, time.monotonic() + job["rest_s"])
    for pid, number in alive.items():
        statuses[number] = None
        os.killpg(pid, 9)
        os.waitpid(pid, 0)
    return {
        "statuses": [statuses[number] for number in range(job["ranks"])],
        "ended": [ended.get(number, time.time()) for number in range(job["ranks"])],
    }


if __name__ == "__main__":
    preload()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(run(json.loads(line))) + "\n")
        answers.flush()
