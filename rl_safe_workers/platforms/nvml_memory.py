"""Reads the device memory of this process alone from NVML.

NVML lists processes by their ids. In a container it may list ids of the machine, or no process. So this module trusts
the figure only after it has grown with an allocation of this process.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

logger = logging.getLogger(__name__)

_PROOF_BYTES = 16 * 2**20
_PIECE_BYTES = 2 * 2**20
"""The smallest piece in which CUDA hands out memory."""


@cache
def process_memory(device: torch.device) -> Callable[[], int] | None:
    """Returns a function for the bytes of device memory that this process uses; None if NVML does not report them.

    If NVML fails later, the function returns the last figure, because no run should end for lack of a figure.

    Args:
        device: A CUDA device on which this process has a context.
    """
    try:
        read = _reader(device)
        before = read()
        with _allocated(device, _PROOF_BYTES):
            grown = read() - before
        is_ours = abs(grown - _PROOF_BYTES) < _PIECE_BYTES and abs(read() - before) < _PIECE_BYTES
    except Exception as error:  # NVML's error classes exist only if it is installed
        logger.debug("NVML does not tell the memory of this process: %r", error)
        return None
    return _Steady(read, before) if is_ours else None


class _Steady:
    """Reads a figure, or repeats the last one if it cannot be read."""

    def __init__(self, read: Callable[[], int], last: int) -> None:
        self._read, self._last = read, last

    def __call__(self) -> int:
        try:
            self._last = self._read()
        except Exception as error:  # see above
            logger.debug("NVML does not tell the memory of this process now: %r", error)
        return self._last


def _reader(device: torch.device) -> Callable[[], int]:
    import pynvml  # from the wheel nvidia-ml-py, which vLLM installs

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def read() -> int:
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        (used,) = (process.usedGpuMemory for process in listed if process.pid == os.getpid())
        return int(used)

    return read


@contextmanager
def _allocated(device: torch.device, size: int) -> Iterator[None]:
    """Holds device memory during the body. Bypasses torch's allocator, which might use its cache for the request."""
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    with torch.cuda.device(device):
        if code := driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)):
            raise MemoryError(f"cuMemAlloc returned {code}")
        try:
            yield
        finally:
            driver.cuMemFree_v2(address)
