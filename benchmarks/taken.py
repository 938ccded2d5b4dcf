"""Device memory that collectives take: the meter of the benchmarks of communicators, ours and others' alike."""

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
    """Device memory outside torch's allocator, and how much of its growth came in collectives."""

    def __init__(self, device: torch.device) -> None:
        self._probe: Callable[[], int] = outside_torch(device) or (lambda: 0)
        self.by_collectives = 0
        self.by_group: Counter[str] = Counter()
        self._start = self._probe()

    def growth(self) -> int:
        """Since the beginning, from whatever."""
        return self._probe() - self._start

    @contextmanager
    def attributed(self) -> Iterator[None]:
        """Counts what the collectives of the body take."""

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
