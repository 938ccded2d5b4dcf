"""Watches this process's memory over the steps of a run, and warns of an owner that grows in each step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property

import torch

from rl_safe_workers import env
from rl_safe_workers.control.bounded import in_background
from rl_safe_workers.control.deadline import Background, Deadline
from rl_safe_workers.diagnostics.memory_growth import MemoryGrowth
from rl_safe_workers.errors import in_one_line
from rl_safe_workers.platforms.device_memory import allocated_bytes, outside_torch, reserved_bytes
from rl_safe_workers.platforms.host_memory import own_bytes, shared_memory_bytes

logger = logging.getLogger(__name__)

HOST, SHARED = "host memory", "/dev/shm of this machine"
TENSORS, OUTSIDE = "tensors on the device", "device memory outside torch, such as communicators,"
"""Names of the owners of memory. torch's cache does not count, because torch can release it."""


class MemoryWatch:
    """Watches the memory of one process, once in each step. Not collective."""

    def __init__(self, who: str, device: torch.device, *, first_here: bool) -> None:
        """Reads no memory yet.

        Args:
            who: Names the process in warnings.
            device: Device of its tensors.
            first_here: True if this process also watches the memory that all processes of its machine share.
        """
        self._who, self._device, self._first_here = who, device, first_here
        self._growth = MemoryGrowth()
        self._reading: Background[int | None] | None = None
        """Reads the memory outside torch since the last step began it; None if no step has begun a read."""

    @cached_property
    def _outside(self) -> Callable[[], int] | None:
        return outside_torch(self._device)

    @property
    def growth_mib(self) -> float:
        """MiB by which the owner with the largest leak grows in a step; 0 if there is no leak."""
        return self._growth.worst / 2**20

    def step(self) -> None:
        """Reads the memory at the end of a step. Warns of an owner that grows in each step.

        The memory outside torch is that of the previous step. This process reads it in the background, because NVML
        took 2 to 9 ms on an H200 that two jobs shared.
        """
        known = {
            HOST: own_bytes(),
            SHARED: shared_memory_bytes() if self._first_here else None,
            TENSORS: allocated_bytes(self._device) if self._device.type == "cuda" else None,
            OUTSIDE: self._outside_before(),
        }
        for leak in self._growth.cycle({owner: taken for owner, taken in known.items() if taken is not None}):
            logger.warning("%s: %s", self._who, leak)

    def _outside_before(self) -> int | None:
        """Returns the memory outside torch at the previous step, if it is known. Begins to read it for this step."""
        read, reading = self._outside, self._reading
        if read is None or (reading is not None and not reading.is_done):
            return None
        self._reading = None
        try:
            found = None if reading is None else reading.wait(Deadline.after(0))
            self._reading = in_background(lambda: self._read(read), name="reading the memory outside torch")
        except Exception as error:  # no run should end for lack of a figure
            logger.warning("%s: the memory outside torch could not be read: %s", self._who, in_one_line(error))
            return None
        return found

    def _read(self, outside: Callable[[], int]) -> int | None:
        """Returns the memory outside torch. Returns None if torch's own memory, which is subtracted, has changed."""
        before = reserved_bytes(self._device)
        found = outside()
        return found if reserved_bytes(self._device) == before else None


def is_first_here(rank: int) -> bool:
    """Returns True for one rank of each machine, by the launcher's local ranks; without a launcher, for rank 0."""
    local = env.local_rank()
    return (rank if local is None else local) == 0
