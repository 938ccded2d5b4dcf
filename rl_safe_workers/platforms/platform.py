"""A platform: how a process takes its device, and which backend its training world has."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch

from rl_safe_workers.lifecycle import Observer


class Platform(Protocol):
    """A module of this package: `cpu` or `cuda`."""

    BACKEND: str
    """torch's name of the backend of the training world."""

    def observer(self, owned: Callable[[], Mapping[str, int]], **options: Any) -> Observer | None:
        """Returns what accounts for device memory at the end of each phase, if there is such memory.

        Call it before `start`. Arguments as for `DeviceMemory`.
        """
        ...

    def start(self) -> torch.device:
        """Prepares this process and returns the device that it works on. Idempotent, not collective."""
        ...


def open_platform(name: str) -> Platform:
    """Returns the platform of a ``cluster.device``: ``"cpu"`` or ``"cuda"``."""
    return cast(Platform, importlib.import_module(f"{__package__}.{name}"))
