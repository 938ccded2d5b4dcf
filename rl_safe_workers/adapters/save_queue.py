"""Stands in for megatron-core's queue of saves in the background, which asks all ranks whether one has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_safe_workers.adapters.shards import PendingShards


class SaveQueue:
    """The names that hosts call, over `PendingShards`: no collective, and no process for a save."""

    def __init__(self, saves: Callable[[], PendingShards | None]) -> None:
        """Holds no save itself.

        Args:
            saves: Returns this rank's save in the background; None until there is a world.
        """
        self._saves = saves

    def schedule_async_request(self, request: Any) -> None:
        """Does nothing: the save has begun, and its end is seen to."""

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> None:
        """Moves the save in the background on, or waits for its end. Waiting is collective over: the training world.

        Raises:
            CheckpointError: On every rank, if the save has failed and this waits.
        """
        saves = self._saves()
        if saves is not None:
            if blocking:
                saves.finish()
            else:
                saves.poll()

    def get_num_unfinalized_calls(self) -> int:
        """Returns how many saves are in the background."""
        return len(self._saves() or ())

    def close(self, abort: bool = False) -> None:
        """Does nothing: there is no process to end."""
