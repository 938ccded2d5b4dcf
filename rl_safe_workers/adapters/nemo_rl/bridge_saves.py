"""The save in the background under Megatron-Bridge, whose last part has a barrier in its midst."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from rl_safe_workers.adapters.patches import replaced
from rl_safe_workers.adapters.shards import PendingShards
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import Gathering
from rl_safe_workers.errors import CheckpointError, RlSafeError
from rl_safe_workers.lifecycle import Phase


class BridgeSaves(PendingShards):
    """As `PendingShards`, but finalised by all ranks at the same time."""

    def poll(self) -> None:
        """Moves the save on. Not collective; does not wait. `finish` finalises it."""
        if self.current is not None:
            self.current.saver.poll()

    def _finalise(self) -> None:
        """Does Bridge's last part on every rank. Collective over: the training world, by the store.

        Bridge writes its own files, waits in a barrier on the default group (training/checkpointing.py:1516), and goes
        on. A rank that cannot write is told of in that barrier's place, where the others would wait for it.

        Raises:
            CheckpointError: On every rank, if one cannot write.
            PhaseTimeoutError: Naming the ranks that do not come in time.
        """
        gathering = self.rank.control.gathering("bridge_save", phase=Phase.SAVE)
        meeting = _Meeting(gathering, Deadline.after(self.rank.timeout(Phase.SAVE)))
        try:
            with replaced(dist, "barrier", meeting.barrier):
                super()._finalise()
        except RlSafeError:
            raise  # every rank's
        except Exception as error:
            meeting.settle(error)
            raise
        meeting.settle()


class _Meeting:
    """The one time that the ranks meet in the last part of a save."""

    def __init__(self, gathering: Gathering, deadline: Deadline) -> None:
        self._gathering, self._deadline, self._is_over = gathering, deadline, False

    def barrier(self, original: Callable[..., Any]) -> Callable[..., None]:
        """Stands in for ``torch.distributed.barrier``."""
        return lambda *args, **kwargs: self.settle()

    def settle(self, failure: Exception | None = None) -> None:
        """Tells the others of a failure, or hears of theirs; nothing once that is done."""
        if not self._is_over:
            self._is_over = True
            self._gathering.settle(self._deadline, failure=failure, foreign=CheckpointError)
