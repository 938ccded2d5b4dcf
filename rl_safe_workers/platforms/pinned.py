"""Allocates page-locked host memory of an exact size, which a GPU can copy to and from at full speed."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from rl_safe_workers.errors import ResourceError


def host_buffer(size_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Returns uninitialised host memory as a uint8 tensor of shape ``[size_bytes]``.

    torch's own pinned memory is rounded up to a power of two (CachingHostAllocator) and is not released: 33 GiB of
    optimizer state would take 64 GiB on the host of every trainer.

    Args:
        size_bytes: Size in bytes.
        pinned: True to page-lock the memory. This needs a GPU and takes about one second for each 2 to 4 GiB.

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
        # Runs before the memory is freed. The memory lives as long as any tensor that views it.
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory)
