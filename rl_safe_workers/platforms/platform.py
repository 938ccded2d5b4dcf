"""Defines a platform: how a process binds its device, and the backend of its training world."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch

from rl_safe_workers.lifecycle import Observer


class Platform(Protocol):
    """A module of this package: `cpu` or `cuda`."""

    BACKEND: str
    """torch's name of the training world's backend."""

    def observer(self, owned: Callable[[], Mapping[str, int]], **options: Any) -> Observer | None:
        """Returns the object that accounts for device memory at the end of each phase; None on a CPU.

        Call it before `start`. Arguments as for `DeviceMemory`.
        """
        ...

    def start(self) -> torch.device:
        """Prepares this process and returns its device. Idempotent; not collective."""
        ...


def open_platform(name: str) -> Platform:
    """Returns the platform for a value of ``cluster.device``: ``"cpu"`` or ``"cuda"``."""
    return cast(Platform, importlib.import_module(f"{__package__}.{name}"))
