"""Lets verl's Megatron engine run on gloo without a GPU, by a device platform for verl and some shims.

For tests and the small recipe; ``VERL_PLATFORM=rl_safe_cpu`` chooses it. Line numbers are of verl 0.9.1. `apply`
patches this process, and raises if there is a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from rl_safe_workers.adapters.verl.environment import CPU_PLATFORM
from rl_safe_workers.platforms import cpu

_applied = False


class _Host(str):
    """The only device. verl uses it as it is, and in ``f"{name}:{index}"`` (megatron_utils.py:233)."""

    def __format__(self, spec: str) -> str:
        return "0"


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


_MODULE = SimpleNamespace(
    current_device=lambda: _Host("cpu"),
    device_count=lambda: 1,
    get_device_name=lambda *args: "cpu",
    is_available=lambda: True,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    mem_get_info=lambda *args: (0, 0),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"), _zero),
    **dict.fromkeys(("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device", "synchronize"), _nothing),
)
"""Stands for ``torch.cuda`` or a similar module. Has the functions that verl calls."""


class HostPlatform(PlatformBase):
    """A machine without accelerators, as one device named ``cpu``."""

    device_name = "cpu"
    vendor_name = "host"
    device_module: Any = _MODULE

    def is_available(self) -> bool:
        """Returns True."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Returns False, so that verl never detects this platform: a user must choose it."""
        return False

    def current_device(self) -> Any:
        """Returns the only device, which is not a number."""
        return _Host("cpu")

    def device_count(self) -> int:
        """Returns 1. With 0, verl would not seed Megatron's generators (engine/megatron/utils.py:35)."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Does nothing: there is only one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Does nothing: work on a CPU is already complete."""

    def manual_seed(self, seed: int) -> None:
        """Seeds torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seeds torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Does nothing: there is no allocator to configure."""

    def empty_cache(self) -> None:
        """Does nothing: there is no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Returns no version: a CPU has none."""
        return None, None

    def communication_backend_name(self) -> str:
        """Returns gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Returns CUDA's variable, which stays empty."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Does nothing: there is no profiler."""
        yield

    def profiler_start(self) -> None:
        """Does nothing: there is no profiler."""

    def profiler_stop(self) -> None:
        """Does nothing: there is no profiler."""

    def ray_resource_name(self) -> str:
        """Returns the resource that verl's pools ask Ray for. ``ray.init(num_gpus=N)`` provides it without a GPU."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Returns no variables."""
        return []

    def is_ipc_supported(self) -> bool:
        """Returns False: there are no handles of device memory. verl then sends weights through shared memory."""
        return False

    def cudart(self) -> Any:
        """Returns None: there is no CUDA runtime."""
        return None


def register_platform() -> None:
    """Adds the platform to verl's registry. Idempotent."""
    if PlatformRegistry.get(CPU_PLATFORM) is None:
        PlatformRegistry.register(platform=CPU_PLATFORM)(HostPlatform)


def apply() -> None:
    """Applies every shim to this process. Idempotent.

    Raises:
        ResourceError: If this process sees a GPU.
    """
    global _applied
    if _applied:
        return
    cpu.apply()
    _applied = True
