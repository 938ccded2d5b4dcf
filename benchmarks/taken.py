"""Measures the device memory that collectives take, for our communicators and for others'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rl_safe_workers.comms.trace import CollectiveTrace
from rl_safe_workers.platforms.device_memory import outside_torch


class Taken:
    """Measures device memory outside torch's allocator, and the part of its growth that came in collectives."""

    def __init__(self, device: torch.device) -> None:
        self._probe: Callable[[], int] = outside_torch(device) or (lambda: 0)
        self.by_collectives = 0
        self.by_group: Counter[str] = Counter()
        self._start = self._probe()

    def growth(self) -> int:
        """Returns the growth in bytes since the beginning, from any cause."""
        return self._probe() - self._start

    @contextmanager
    def attributed(self) -> Iterator[None]:
        """Counts the bytes that the collectives of the body take."""

        def issue(group: dist.ProcessGroup, operation: str, call: Callable[[], Any]) -> Any:
            before = self._probe()
            value = call()
            taken = max(0, self._probe() - before)
            self.by_collectives += taken
            if taken:
                self.by_group[f"{group.group_desc} {operation}"] += taken
            return value

        with CollectiveTrace(issue):
            yield
