"""Finalises a background save under Megatron-Bridge. The last part of Bridge's save contains a barrier."""

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
    """Holds the background save like `PendingShards`, but all ranks finalise it at the same time."""

    def poll(self) -> None:
        """Polls the save, without finalising it: `finish` does that. Not collective; does not wait."""
        if self.current is not None:
            self.current.saver.poll()

    def _finalise(self) -> None:
        """Runs the last part of Bridge's save on every rank. Collective over: the training world, by the store.

        Bridge writes its own files, waits in a barrier on the default group (training/checkpointing.py:1516), and goes
        on. An agreement over the store replaces that barrier. So the ranks learn of a rank that cannot write.

        Raises:
            CheckpointError: On every rank, if a rank cannot write.
            PhaseTimeoutError: If ranks do not come in time; names them.
        """
        gathering = self.rank.control.gathering("bridge_save", phase=Phase.SAVE)
        meeting = _Meeting(gathering, Deadline.after(self.rank.timeout(Phase.SAVE)))
        try:
            with replaced(dist, "barrier", meeting.barrier):
                super()._finalise()
        except RlSafeError:
            raise  # every rank raises it
        except Exception as error:
            meeting.settle(error)
            raise
        meeting.settle()


class _Meeting:
    """The single agreement of the ranks in the last part of a save."""

    def __init__(self, gathering: Gathering, deadline: Deadline) -> None:
        self._gathering, self._deadline, self._is_over = gathering, deadline, False

    def barrier(self, original: Callable[..., Any]) -> Callable[..., None]:
        """Returns a replacement for ``torch.distributed.barrier``."""
        return lambda *args, **kwargs: self.settle()

    def settle(self, failure: Exception | None = None) -> None:
        """Tells the other ranks of a failure, or raises theirs. Does nothing after the first call."""
        if not self._is_over:
            self._is_over = True
            self._gathering.settle(self._deadline, failure=failure, foreign=CheckpointError)
