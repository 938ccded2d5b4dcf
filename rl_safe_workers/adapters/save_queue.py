"""Replaces megatron-core's queue of background saves, which needs a collective to learn that a save has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_safe_workers.adapters.shards import PendingShards


class SaveQueue:
    """Offers the methods that hosts call, on top of `PendingShards`. Needs no collective, and no process per save."""

    def __init__(self, saves: Callable[[], PendingShards | None]) -> None:
        """Holds no save itself.

        Args:
            saves: Returns this rank's save in the background; None until the world exists.
        """
        self._saves = saves

    def schedule_async_request(self, request: Any) -> None:
        """Does nothing: the save has already begun, and `PendingShards` finalises it."""

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> None:
        """Polls the save in the background, or waits for its end. Waiting is collective over: the training world.

        Raises:
            CheckpointError: On every rank, if the save has failed and ``blocking`` is True.
        """
        saves = self._saves()
        if saves is not None:
            if blocking:
                saves.finish()
            else:
                saves.poll()

    def get_num_unfinalized_calls(self) -> int:
        """Returns the number of saves in the background, 0 or 1."""
        return len(self._saves() or ())

    def close(self, abort: bool = False) -> None:
        """Does nothing: there is no process to end."""
