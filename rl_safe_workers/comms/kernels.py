"""Loads NCCL's kernels before any communicator exists, so that no communicator is charged for them.

The kernels stay for as long as the process lives, and take some 420 MiB of device memory on an H200. Otherwise the
first collective would seem to cost that memory, which no release can return.
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
    """Loads NCCL's kernels in this process unless they are loaded, and yields the cost. Not collective.

    It makes a communicator of this rank alone. A thread ends this communicator during the body, in half a second.

    Args:
        device: The CUDA device.
        probe: Returns the device memory outside torch's allocator.
        timeout: Longest wait for the end of the communicator.
        supervised: Runs the loading function, in a thread of its choice, and returns its result.
    """
    if device in _loaded:
        yield Kernels()
        return
    kernels, alone = supervised(lambda: _load(device, probe, timeout))
    _loaded.add(device)
    ending = in_background(alone.shutdown, name="ending a communicator")
    yield kernels
    with suppress(DeadlineExceededError):
        ending.wait(Deadline.after(timeout))


def _load(device: torch.device, probe: Callable[[], int], timeout: timedelta) -> tuple[Kernels, Any]:
    """Loads the kernels. Returns their cost, and the communicator, which the caller must shut down."""
    torch.cuda.set_device(device)
    # Load torch's own kernels before the measurement: they are not NCCL's.
    message, answer = torch.zeros(1, device=device), torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    before, started_s = probe(), time.monotonic()
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = 1
    alone = Channel("cuda", "nccl", kept=False, timeout=timeout, options=options)
    alone.connect(dist.HashStore(), 0, 1, name="rl_safe_kernels", members=[dist.get_rank()], bound=timeout)
    _fire(alone.inner, message, answer, device)
    # The measurement includes the communicator's own megabytes, which it frees when it ends.
    kernels = Kernels(bytes=probe() - before, seconds=time.monotonic() - started_s)
    return kernels, alone.detach()


def _fire(group: Any, message: torch.Tensor, answer: torch.Tensor, device: torch.device) -> None:
    """Issues a reduction, which loads all kernels, and an exchange, which needs the largest stack."""
    group.allreduce([message]).wait()
    group._start_coalescing(device)
    group.send([message], 0, 0)
    group.recv([answer], 0, 0)
    group._end_coalescing(device).wait()
    torch.cuda.synchronize(device)
