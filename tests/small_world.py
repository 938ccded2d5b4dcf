"""Ranks of a small world as threads of one process, each with a connection of its own to one store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.control.seal import new_secret
from rl_safe_workers.ranks import trainer_ids

PATIENCE = timedelta(seconds=20)


class SmallWorld:
    """A store, and the places of its ranks."""

    def __init__(self, size: int = 3) -> None:
        self.size, self.secret = size, new_secret()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        self.planes = [self.plane(rank) for rank in range(size)]

    def connect(self) -> TCPStore:
        """Another connection, such as a stranger's."""
        return TCPStore("127.0.0.1", self.store.port, is_master=False, wait_for_workers=False, timeout=PATIENCE)

    def plane(self, rank: int) -> ControlPlane:
        """A rank's place, made anew."""
        return ControlPlane(
            self.connect(), world="training world", rank=rank, members=trainer_ids(range(self.size)), secret=self.secret
        )

    def each(self, call: Callable[[ControlPlane], Any], ranks: Collection[int] | None = None) -> list[Any]:
        """Calls a function for several ranks at once; returns their values or errors."""
        outcomes: dict[int, Any] = {}

        def run(rank: int) -> None:
            try:
                outcomes[rank] = call(self.planes[rank])
            except Exception as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks or range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [outcomes[rank] for rank in sorted(outcomes)]
