"""Host memory that a GPU can copy to and from at full speed, of the size that was asked for."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from rl_safe_workers.errors import ResourceError


def host_buffer(size_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Returns uninitialised host memory, ``[size_bytes]`` of uint8.

    torch's own pinned memory is rounded up to a power of two (CachingHostAllocator), and not given back: 33 GiB of
    optimizer state would take 64 GiB of every trainer's host.

    Args:
        size_bytes: Its size.
        pinned: Whether to page-lock it, which takes a GPU, and about a second for each 2 to 4 GiB.

    Raises:
        ResourceError: If the memory cannot be page-locked.
    """
    memory = np.empty(size_bytes, np.uint8)
    if pinned and size_bytes:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = memory.ctypes.data
        status = int(runtime.cudaHostRegister(address, size_bytes, 0))
        if status != 0:
            raise ResourceError(f"{size_bytes} bytes of host memory cannot be page-locked: CUDA error {status}")
        # Before the memory itself is freed, which every tensor that views it prevents.
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory)
