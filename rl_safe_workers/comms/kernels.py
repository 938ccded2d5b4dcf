"""NCCL's kernels, loaded before any communicator, so that none is charged with them.

They stay for as long as the process lives: some 420 MiB of device memory on an H200, which the first collective of all
would be taken to cost, and which no release gives back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rl_safe_workers.comms.channel import Channel
from rl_safe_workers.control.bounded import in_background
from rl_safe_workers.control.deadline import Deadline, DeadlineExceededError

_loaded: set[torch.device] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The cost of loading NCCL's kernels.

    Example: ``Kernels(bytes=438304768, seconds=0.6)``
    """

    bytes: int = 0
    seconds: float = 0.0


def _at_once(work: Callable[[], Any]) -> Any:
    return work()


@contextmanager
def loaded_kernels(
    device: torch.device,
    probe: Callable[[], int],
    *,
    timeout: timedelta,
    supervised: Callable[[Callable[[], Any]], Any] = _at_once,
) -> Iterator[Kernels]:
    """Loads NCCL's kernels in this process, if they are not; yields what that cost. Not collective.

    A communicator of this rank alone does it. Its end, half a second in a thread, is awaited after the body only.

    Args:
        device: The CUDA device.
        probe: Tells the device memory that is not torch's.
        timeout: Longest wait for its end.
        supervised: Does the loading, in whatever thread, and returns its value.
    """
    if device in _loaded:
        yield Kernels()
        return
    kernels, alone = supervised(lambda: _load(device, probe, timeout))
    _loaded.add(device)
    ending = in_background(alone.shutdown)
    yield kernels
    with suppress(DeadlineExceededError):
        ending.wait(Deadline.after(timeout))


def _load(device: torch.device, probe: Callable[[], int], timeout: timedelta) -> tuple[Kernels, Any]:
    """Returns what it has cost, and the communicator, to be shut down."""
    torch.cuda.set_device(device)
    # torch's own kernels first: they are not NCCL's.
    message, answer = torch.zeros(1, device=device), torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    before, started_s = probe(), time.monotonic()
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = 1
    alone = Channel("cuda", "nccl", kept=False, timeout=timeout, options=options)
    alone.connect(dist.HashStore(), 0, 1, name="rl_safe_kernels", members=[dist.get_rank()], bound=timeout)
    _fire(alone.inner, message, answer, device)
    # The communicator's own megabytes are counted, too, and go with it.
    kernels = Kernels(bytes=probe() - before, seconds=time.monotonic() - started_s)
    return kernels, alone.detach()


def _fire(group: Any, message: torch.Tensor, answer: torch.Tensor, device: torch.device) -> None:
    """Issues what loads all of them, and what needs the largest stack: an exchange."""
    group.allreduce([message]).wait()
    group._start_coalescing(device)
    group.send([message], 0, 0)
    group.recv([answer], 0, 0)
    group._end_coalescing(device).wait()
    torch.cuda.synchronize(device)
