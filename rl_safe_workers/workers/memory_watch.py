"""Watches this process's memory over the steps of a run, and warns of an owner that grows in each step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property

import torch

from rl_safe_workers import env
from rl_safe_workers.diagnostics.memory_growth import MemoryGrowth
from rl_safe_workers.platforms.device_memory import outside_torch
from rl_safe_workers.platforms.host_memory import own_bytes, shared_memory_bytes

logger = logging.getLogger(__name__)

HOST, SHARED = "host memory", "/dev/shm of this machine"
TENSORS, OUTSIDE = "tensors on the device", "device memory outside torch, such as communicators,"
"""The owners. torch's cache does not count, because torch can release it."""


class MemoryWatch:
    """Watches the memory of one process, once in each step. Not collective."""

    def __init__(self, who: str, device: torch.device, *, first_here: bool) -> None:
        """Looks at nothing yet.

        Args:
            who: Names the process in warnings.
            device: Device of its tensors.
            first_here: True if this process also watches the memory that all processes of its machine share.
        """
        self._who, self._device, self._first_here = who, device, first_here
        self._growth = MemoryGrowth()

    @cached_property
    def _outside(self) -> Callable[[], int] | None:
        return outside_torch(self._device)

    @property
    def growth_mib(self) -> float:
        """MiB by which the owner with the largest leak grows in a step; 0 if there is no leak."""
        return self._growth.worst / 2**20

    def step(self) -> None:
        """Reads the memory at the end of a step. Warns of an owner that grows in each step."""
        known = {HOST: own_bytes(), SHARED: shared_memory_bytes() if self._first_here else None}
        sizes = {owner: taken for owner, taken in known.items() if taken is not None}
        if self._outside is not None:
            sizes |= {TENSORS: torch.cuda.memory_allocated(self._device), OUTSIDE: self._outside()}
        for leak in self._growth.cycle(sizes):
            logger.warning("%s: %s", self._who, leak)


def is_first_here(rank: int) -> bool:
    """Returns True for one rank of each machine, by the launcher's local ranks; without a launcher, for rank 0."""
    local = env.local_rank()
    return (rank if local is None else local) == 0
