"""Calls NCCL to free the device memory of a communicator, and to allocate it again.

``ncclCommSuspend`` and ``ncclCommResume`` exist since NCCL 2.29.7, for memory that NCCL has mapped itself (cuMem).
torch offers them as ``Backend.suspend`` and ``Backend.resume`` since 2.12 (pytorch 176300). An older torch may run with
a newer NCCL, loaded before torch's own. This module then calls NCCL directly, with the pointer of
``ProcessGroupNCCL._comm_ptr``. That method is private, and was seen in torch 2.11. It does not return the communicators
that torch makes for unbatched sends, one for each pair of ranks.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import torch
from torch._C._distributed_c10d import Backend

from rl_safe_workers import env
from rl_safe_workers.errors import CommunicatorError

NEEDED_NCCL = (2, 29, 7)
_LIBRARY = "libnccl.so.2"
_MEMORY = 1
"""``NCCL_SUSPEND_MEM`` of nccl.h."""


def can_suspend(device: torch.device, *, sends_unbatched: bool) -> bool:
    """Returns True if this process can suspend all communicators of a device.

    Args:
        device: The device.
        sends_unbatched: True if some group carries unbatched sends. Only torch can suspend their communicators.
    """
    if device.type != "cuda" or env.nccl_cumem_is_off() or why_not():
        return False
    return _torch_suspends() or not sends_unbatched


def why_not() -> str:
    """Returns the reason why the NCCL of this process cannot suspend a communicator; "" if it can."""
    version = loaded_version()
    if version is None:
        return "no NCCL is loaded"
    if version < NEEDED_NCCL:
        return "NCCL has that since 2.29.7"
    if not _torch_suspends() and not hasattr(_process_group(), "_comm_ptr"):
        return f"torch has that since 2.12, and torch {torch.__version__} does not give the pointer of a communicator"
    return ""


@cache
def loaded_version() -> tuple[int, ...] | None:
    """Returns the version of the NCCL library in this process; None if it has no NCCL.

    ``torch.cuda.nccl.version()`` is the version that torch was built with.
    """
    library, code = _library(), ctypes.c_int()
    if library is None:  # torch may have been linked with it
        return tuple(torch.cuda.nccl.version()) if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    library.ncclGetVersion(ctypes.byref(code))
    return code.value // 10_000, code.value // 100 % 100, code.value % 100


def suspend(backend: Any) -> None:
    """Suspends the communicator of a torch backend. Collective over: its ranks. Nothing may be queued on it.

    Raises:
        CommunicatorError: If NCCL refuses.
    """
    if _torch_suspends():
        backend.suspend()
    else:
        _call("ncclCommSuspend", backend, _MEMORY)


def resume(backend: Any) -> None:
    """Resumes a suspended communicator. Collective over: its ranks. Errors as `suspend`."""
    if _torch_suspends():
        backend.resume()
    else:
        _call("ncclCommResume", backend)


def _call(name: str, backend: Any, *flags: int) -> None:
    library, pointer = _library(), backend._comm_ptr()
    if library is None or not pointer:
        raise CommunicatorError(f"{name}: the group has no communicator yet")
    if code := getattr(library, name)(ctypes.c_void_p(pointer), *flags):
        library.ncclGetErrorString.restype = ctypes.c_char_p
        raise CommunicatorError(f"{name}: {library.ncclGetErrorString(code).decode()}")


def _torch_suspends() -> bool:
    return hasattr(Backend, "suspend")


def _process_group() -> Any:
    return getattr(torch._C._distributed_c10d, "ProcessGroupNCCL", None)


@cache
def _library() -> ctypes.CDLL | None:
    """Returns the NCCL library that this process has loaded, or None. Loads nothing."""
    try:
        return ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
