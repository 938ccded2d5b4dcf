"""A rank that never heard of this package, for `rl-safe explain --pid`: it does what its arguments say, then waits."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

LONG_S = 600.0


def misbehave(fault: str, folder: Path) -> None:
    if fault == "stopped":
        os.kill(os.getpid(), 19)
    if fault in ("sleeps", "sleeps-outside-pair", "sleeps-before-async", "sleeps-last"):
        time.sleep(LONG_S)  # the line of a sleeping rank
    if fault == "works":
        while True:
            pass
    if fault == "other":
        dist.barrier()  # the line of a rank in another collective
    if fault == "pipe":
        reading, writing = os.pipe()
        if os.fork() == 0:
            time.sleep(LONG_S)
        os.close(writing)
        os.read(reading, 1)
    if fault == "lock":
        held, holder_is_ready = os.open(folder / "lock", os.O_CREAT | os.O_RDWR), folder / "held"
        if os.fork() == 0:
            fcntl.flock(os.open(folder / "lock", os.O_RDWR), fcntl.LOCK_EX)
            holder_is_ready.touch()
            time.sleep(LONG_S)
        while not holder_is_ready.exists():
            time.sleep(0.05)
        fcntl.flock(held, fcntl.LOCK_EX)
    if fault == "disk":  # a child that cannot start holds its parent in uninterruptible sleep
        os.mkfifo(folder / "fifo")
        actions = [(os.POSIX_SPAWN_OPEN, 0, str(folder / "fifo"), os.O_RDONLY, 0)]
        os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions)
    if fault == "killed":
        os.kill(os.getpid(), 9)


def main() -> None:
    fault, culprit, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if fault == "killed-early":
        (folder / f"ready_{os.environ['RANK']}").touch()
        if int(os.environ["RANK"]) == culprit:
            os.kill(os.getpid(), 9)
    dist.init_process_group("gloo")
    rank, tensor = dist.get_rank(), torch.ones(2)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.barrier()
    (folder / f"ready_{rank}").touch()
    if rank == culprit:
        misbehave(fault, folder)
    if fault == "sleeps-last":
        return
    if fault == "sleeps-outside-pair":
        dist.all_reduce(tensor, group=pairs[rank // 2])
        dist.barrier()
    if fault == "receive-chain":
        time.sleep(LONG_S) if rank == 3 else dist.recv(tensor, src=rank + 1)
    if fault == "sleeps-before-async":
        dist.all_reduce(tensor, async_op=True).wait()
    if fault == "pairs-crossed" and rank == 0:
        dist.all_reduce(tensor, group=pairs[0])
    if fault == "shapes":
        tensor = torch.ones(2 + rank)
    dist.all_reduce(tensor)
    while fault == "moves":
        dist.all_reduce(tensor)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
