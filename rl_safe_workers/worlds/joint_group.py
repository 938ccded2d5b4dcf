"""The joint group: trainers and rollout ranks, for weight sync, beside every default group.

It is a bare process group on its own store prefix: it has no counter-given name, is not registered with
``torch.distributed``, and no code that uses default groups can reach it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.worlds.roll_call import RollCall

_ASK_S = 1e-4
_SHARE = 0.8


class JointGroup:
    """A communicator over trainers (joint ranks 0 to T-1) and rollout ranks (T to T+R-1)."""

    def __init__(
        self,
        store: Store,
        *,
        joint_rank: int,
        size: int,
        generation: int,
        timeout: timedelta,
        device: torch.device,
        sync_timeout: timedelta | None = None,
    ) -> None:
        """Joins. Collective over: all ``size`` ranks; blocks until all have joined or ``timeout`` has passed.

        Args:
            store: The run's store.
            joint_rank: This process's rank in the joint group.
            size: Number of trainers and rollout ranks.
            generation: Counts rebuilds; each uses store keys of its own.
            timeout: Longest wait for the others.
            device: Where the tensors are: a CPU makes a gloo group, a GPU one of NCCL.
            sync_timeout: Longest wait of one broadcast, or, on a GPU, of a `flush`; None: the same.

        Raises:
            PhaseTimeoutError: Naming the joint ranks that did not come in time.
            WeightSyncError: If the group cannot be connected.
        """
        self.joint_rank, self.size, self.generation = joint_rank, size, generation
        self._device, self._sync_timeout = device, sync_timeout or timeout
        # The group by itself would wait for the missing, too, but could not say who they are.
        roll_call = RollCall(store, world=f"joint group {generation}", group_rank=joint_rank, size=size)
        roll_call.arrive(Phase.JOINT, timeout=timeout)
        prefix = PrefixStore(f"joint/{generation}", store)
        # The stubs leave out what it inherits from Backend.
        self._group: Any = None
        failure = self._connect(prefix, timeout)
        if failure is not None:
            self.close()
            raise WeightSyncError(f"joint rank {joint_rank} could not join the joint group: {failure}")

    def _connect(self, store: Store, timeout: timedelta) -> str | None:
        """Returns what failed, not the exception: its traceback would keep the group."""
        try:
            if self._device.type != "cuda":
                self._group = dist.ProcessGroupGloo(store, self.joint_rank, self.size, self._sync_timeout)
                return None
            options = dist.ProcessGroupNCCL.Options()
            # Its watchdog ends the whole process; `flush` raises before that.
            options._timeout = 2 * max(timeout, self._sync_timeout) + timedelta(seconds=60)
            self._group = dist.ProcessGroupNCCL(store, self.joint_rank, self.size, options)
            # NCCL connects at the first collective, which would be in the middle of a run, when memory is full.
            self._group.broadcast(torch.zeros(1, device=self._device), 0).wait()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return self._wait(timeout)

    @property
    def is_open(self) -> bool:
        """Whether the group can be used."""
        return self._group is not None

    def broadcast(self, tensors: Sequence[torch.Tensor], *, source: int) -> None:
        """Broadcasts contiguous tensors in order. Collective over: the joint group.

        On a CPU it blocks until all have arrived. On a GPU it only queues them, on the current stream; `flush` waits.

        Args:
            tensors: Same number, shapes and dtypes on every rank; written in place everywhere but on ``source``.
            source: Joint rank that sends.

        Raises:
            WeightSyncError: If a peer is gone or the timeout passed; the group is closed then. A rank can succeed
                where another fails, so the outcome must be agreed on over the training world.
        """
        if self._group is None:
            raise WeightSyncError(f"joint rank {self.joint_rank}: the joint group is closed")
        failure = self._run_broadcasts(tensors, source)
        if failure is not None:
            # Whoever waits for this rank hears of it at once, and not at the timeout.
            self.close()
            raise WeightSyncError(f"joint rank {self.joint_rank}: broadcast over the joint group failed: {failure}")

    def _run_broadcasts(self, tensors: Sequence[torch.Tensor], source: int) -> str | None:
        """Returns what failed, not the exception: its traceback would keep the connections open."""
        try:
            works = [self._group.broadcast(tensor, source) for tensor in tensors]
            for work in works:
                work.wait()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return None

    def flush(self, timeout: timedelta | None = None) -> None:
        """Waits until everything broadcast so far has arrived. Collective over: the joint group.

        Args:
            timeout: Longest wait; None: most of ``sync_timeout``, so that this ends before any group of the training
                world gives up what hangs behind these broadcasts on the same stream.

        Raises:
            WeightSyncError: If that takes longer, as when a peer is gone, which NCCL does not notice; the group is
                closed then.
        """
        if self._group is None:
            raise WeightSyncError(f"joint rank {self.joint_rank}: the joint group is closed")
        if self._device.type == "cuda" and (failure := self._wait(timeout or _SHARE * self._sync_timeout)):
            raise WeightSyncError(f"joint rank {self.joint_rank}: broadcasts over the joint group {failure}")

    def _wait(self, timeout: timedelta) -> str | None:
        """Waits for the current stream; gives the group up and says what failed if it does not end well."""
        try:
            if wait_for_stream(self._device, timeout):
                return None
            failure = f"timed out after {timeout.total_seconds():.1f} s: a peer is gone, or raise rl_safe.timeouts.sync"
        except RuntimeError as error:
            failure = str(error).splitlines()[0]
        group, self._group = self._group, None
        group.abort()
        return failure

    def close(self) -> None:
        """Leaves the group. Not collective; idempotent."""
        # Connections close with the last reference; shutdown alone leaves them open.
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()


def wait_for_stream(device: torch.device, timeout: timedelta) -> bool:
    """Waits for what is queued on a GPU's current stream; returns whether it ended in time.

    Raises RuntimeError if the device has failed. Asks and sleeps by turns, because torch's own waits have no deadline.
    """
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    deadline_s = time.monotonic() + timeout.total_seconds()
    while not done.query():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_ASK_S)
    return True
