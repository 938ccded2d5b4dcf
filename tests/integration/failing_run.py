"""A run that fails in one actor of Ray or one rank of torchrun, without this package in it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

RECORDED_S = 1.0
"""gloo's own thread records the end of a collective after the caller has gone on."""


def fail(how: str, folder: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "import":
        import no_such_module  # noqa: F401
    if how == "full":
        with (Path(folder) / "full" / "shard").open("wb") as file:
            file.write(bytes(2**22))
    if how == "raises":
        raise ValueError("no such expert")


def with_ray(how: str, folder: str) -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder + "/r")

    @ray.remote(num_cpus=0)
    class Trainer:
        def train(self, how: str) -> int:
            fail(how, folder)
            return os.getpid()

    actors = [Trainer.remote() for _ in range(2)]
    (Path(folder) / "pid").write_text(str(ray.get(actors[1].train.remote("well"))))
    ray.get([actors[0].train.remote("well"), actors[1].train.remote(how)])


def with_torchrun(how: str, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(2))
    if rank == 1 and how != "late":
        fail(how, folder)
    if rank != 1:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        if how != "late":
            work.wait()
    time.sleep(RECORDED_S)
    (Path(folder) / f"flight_gloo_{rank}").write_bytes(_dump_fr_trace(True, False, False))
    if how == "late":
        os._exit(0)


if __name__ == "__main__":
    {"ray": with_ray, "torchrun": with_torchrun}[sys.argv[1]](*sys.argv[2:])
