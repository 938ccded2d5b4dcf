"""A dataset for verl's supervised trainer whose rows keep one rank waiting between two updates."""

from __future__ import annotations

import os
import threading
from typing import Any

from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

VICTIM, ROW = "1", 3
"""The rank, and which of the rows that it reads is the first of its second update, counted from 1."""


def take_cache_lock() -> None:
    """Waits for a lock that nobody gives back."""
    threading.Semaphore(0).acquire()


class WaitingRows(MultiTurnSFTDataset):
    """verl's rows."""

    _read = 0

    def __getitem__(self, item: int) -> Any:
        self._read += 1
        if os.environ["RANK"] == VICTIM and self._read == ROW:
            take_cache_lock()
        return super().__getitem__(item)
