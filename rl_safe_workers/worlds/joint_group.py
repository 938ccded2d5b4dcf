"""The joint group of trainers and rollout ranks. It carries weight syncs, and exists beside every default group.

It is a bare process group on its own store prefix. It has no name from torch's counter and is not registered with
``torch.distributed``, so code that uses default groups cannot reach it.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from rl_safe_workers.control.board import forget_where
from rl_safe_workers.control.bounded import failure_of, in_background
from rl_safe_workers.control.connection import own_connection
from rl_safe_workers.control.deadline import Background, Deadline, DeadlineExceededError
from rl_safe_workers.control.failure import Failure
from rl_safe_workers.control.plane import NO_OUTCOME, ControlPlane, Operation
from rl_safe_workers.errors import RlSafeError, WeightSyncError, first_line, foreign_cause
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role, format_ranks, joint_ids
from rl_safe_workers.setting_names import timeout_setting
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.store import connect_store

logger = logging.getLogger(__name__)

_POLL_S, _ABORT_S = 1e-4, 10.0
_PREFIX, _WORLD = "joint", "joint group"
CONNECT_SHARE = 0.8
"""Share of the time to join in which a rank connects. The rest is for the exchange of outcomes."""
_SYNC_SHARE = 0.8
"""Share of ``sync_timeout`` that a wait may take. It ends before a collective behind it times out."""
LATE = "did not connect in time"
"""Outcome of a rank that only waited for others."""
_AHEAD = 2
"""The largest number of unfinished broadcasts of each part on a GPU. A CUDA stream takes some 1,000 launches. With
more, the launch itself would wait, without a deadline."""
_CTAS = 64
"""The largest number of multiprocessors that all communicators of a rank use together, about half of an H100. The
communicators run at the same time. If they did not fit onto the GPU together, each could wait for another's peer."""


def compare_outcomes(operation: Operation, failure: Failure | None, deadline: Deadline) -> None:
    """Raises on every joint rank if one has not connected. Collective over: the joint ranks, through the store.

    A rank that leaves closes its connections. gloo then fails on ranks that still connect. So no rank leaves or
    goes on before all ranks have reported their outcomes.

    Args:
        operation: An operation that all joint ranks have begun.
        failure: This rank's failure to connect, with the text `LATE` if it only waited for others; None if it has
            connected.
        deadline: Longest wait for the others.

    Raises:
        PhaseTimeoutError: If ranks do not report in time; names them.
        WeightSyncError: If a rank has not connected; names it.
    """
    told = operation.exchange("told", "" if failure is None else failure.text, deadline)
    if failure is not None and failure.text != LATE:
        text = f"joint rank {operation.rank} could not join the joint group: {failure.text}"
        raise WeightSyncError(text, foreign=failure.foreign)
    for rank, text in told.items():
        if text not in ("", LATE, NO_OUTCOME):
            text = f"joint rank {rank} could not join the joint group: {text}"
            raise WeightSyncError(text, culprit=operation.members[rank])
    # A rank that has died keeps the others from connecting, and is silent.
    if silent := [rank for rank, text in told.items() if text == NO_OUTCOME]:
        raise operation.late(silent, deadline, place="told")
    if late := [rank for rank, text in told.items() if text]:
        text = f"joint rank {format_ranks(late)} could not join the joint group: {LATE}"
        raise WeightSyncError(text, foreign=ForeignCause.TIMEOUT)


def joint_world(generation: int) -> str:
    """Returns the name of the world of trainers and rollout ranks. Each rebuild makes a new world."""
    return f"{_WORLD} {generation}"


def joint_control(
    address: StoreAddress,
    *,
    generation: int,
    joint_rank: int,
    trainers: int,
    rollout_ranks: Sequence[int],
    timeout: timedelta,
) -> ControlPlane:
    """Connects to a store, and returns this process's place in the joint world. Not collective.

    Args:
        address: Address of the store.
        generation: Number of rebuilds of the joint group so far.
        joint_rank: This process's joint rank.
        trainers: Number of trainers.
        rollout_ranks: Rollout ranks in the group, ascending.
        timeout: Longest wait for the connection.

    Raises:
        CommunicatorError: If the store cannot be reached.
    """
    return ControlPlane(
        connect_store(address, timeout=timeout),
        world=joint_world(generation),
        rank=joint_rank,
        members=joint_ids(trainers=trainers, size=trainers + len(rollout_ranks), rollout_ranks=rollout_ranks),
        secret=address.secret,
    )


def forget_joint_groups(store: Store, *, before: int) -> None:
    """Deletes the keys of earlier generations from the run's store, once all members have joined a later one.

    Args:
        store: The run's store.
        before: The first generation that stays.
    """
    if before > 0:
        kept = re.compile(rf"({_PREFIX}/|{_WORLD} )(\d+)/")
        forget_where(store, lambda key: (of := kept.match(key)) is not None and int(of[2]) < before)


class JointGroup:
    """Communicators over trainers (joint ranks 0 to T-1) and rollout ranks (T to T+R-1).

    The ranks of a tensor-parallel engine get different parts of the weights. So there is a communicator for each part:
    over all trainers, and over the rollout ranks that get this part.
    """

    def __init__(
        self,
        control: ControlPlane,
        *,
        generation: int,
        timeout: timedelta,
        device: torch.device,
        sync_timeout: timedelta | None = None,
        parts: int = 1,
    ) -> None:
        """Joins the group. Collective over: all ranks of ``control``. Blocks until each rank has connected or failed.

        Args:
            control: This process's place in the world `joint_world` of trainers and rollout ranks.
            generation: Counts rebuilds; each uses store keys of its own.
            timeout: Longest wait for the others to come and to connect.
            device: Device of the tensors. A CPU makes a gloo group, a GPU an NCCL group.
            sync_timeout: Longest wait of one broadcast, or of a `flush` on a GPU; None for ``timeout``.
            parts: Number of ranks of an engine. Consecutive rollout ranks get consecutive parts.

        Raises:
            PhaseTimeoutError: Naming the ranks that did not come, or did not connect, in time.
            WeightSyncError: On every rank, if a rank cannot connect; names it.
        """
        deadline = Deadline.after(timeout)
        self.joint_rank, self.size, self.generation = control.rank, control.size, generation
        self._device, self._sync_timeout = device, sync_timeout or timeout
        # The group would also wait for missing ranks, but could not name them.
        control.barrier(Phase.JOINT, deadline)
        # Use a connection of its own: NCCL waits in it for peers without end, and blocks it for all others.
        prefix = PrefixStore(f"{_PREFIX}/{generation}", own_connection(control.store))
        # The values are Any, because the type stubs leave out what a group inherits from Backend.
        self._groups: dict[int, Any] = {}
        """The communicators of this rank, by part; empty if the group is closed."""
        self._works: deque[Any] = deque()
        """Broadcasts that no call has awaited yet. Each keeps the connections open, so keep no reference elsewhere."""
        self._started = 0
        self._under_way: deque[Any] = deque()
        """On a GPU, the broadcasts that may not have ended. The current stream waits for them."""
        self._deadline = Deadline.after(math.inf)
        failure = self._connect(prefix, _members_of_parts(control.members, parts), deadline.share(CONNECT_SHARE))
        try:
            compare_outcomes(control.begin("connected", phase=Phase.JOINT), failure, deadline)
        except RlSafeError:
            self.abort()
            raise

    def _connect(self, store: Store, members: Sequence[Sequence[int]], deadline: Deadline) -> Failure | None:
        """Connects this rank's parts; returns the failure, or None. An exception's traceback would keep the group."""

        def connect() -> None:
            for part, ranks in enumerate(members):
                if self.joint_rank in ranks:
                    place = ranks.index(self.joint_rank), len(ranks)
                    self._connect_part(part, PrefixStore(str(part), store), *place, len(members), deadline)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

        try:
            # On a thread, because NCCL connects without a deadline.
            error = in_background(lambda: failure_of(connect), name="joining the joint group").wait(deadline)
        except DeadlineExceededError:
            return Failure(LATE, foreign=ForeignCause.TIMEOUT)
        if error is not None and foreign_cause(error) is ForeignCause.TIMEOUT:
            return Failure(LATE, foreign=ForeignCause.TIMEOUT)
        return None if error is None else _failure(error)

    def _connect_part(self, part: int, store: Store, rank: int, size: int, parts: int, deadline: Deadline) -> None:
        group: Any
        if self._device.type != "cuda":
            self._groups[part] = group = dist.ProcessGroupGloo(store, rank, size, deadline.remaining())
            group._set_default_timeout(self._sync_timeout)
            return
        # A copy into or out of the other buffer becomes ready together with a broadcast. Without this priority, the
        # copy takes all multiprocessors first. The broadcast then waits 0.1 to 0.17 ms for it (traced on an H100).
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if parts > 1:
            options.config.max_ctas = max(1, _CTAS // parts)
        # NCCL's watchdog would end the whole process at its timeout; `broadcast` and `flush` raise before that.
        options._timeout = 2 * max(deadline.remaining(), self._sync_timeout) + timedelta(seconds=60)
        self._groups[part] = group = dist.ProcessGroupNCCL(store, rank, size, options)
        # Connect now: NCCL would connect at the first collective, in the middle of a run, when memory is full.
        group.broadcast(torch.zeros(1, device=self._device), 0).wait()

    @property
    def is_open(self) -> bool:
        """True if the group can be used."""
        return bool(self._groups)

    has_all_parts = False
    """True if a rollout rank gets the parts of other ranks, too."""

    def buffers(self, size_bytes: int) -> list[torch.Tensor]:
        """Returns two buffers for broadcasts, ``[size_bytes]`` of uint8. `broadcast` also takes other tensors."""
        return two_buffers(size_bytes, self._device)

    def broadcast(self, *parts: torch.Tensor, source: int) -> Callable[[], None]:
        """Starts to broadcast contiguous tensors, each to the rollout ranks that get its part.

        Collective over: the joint group, in the same order on all ranks.

        Args:
            parts: A tensor for each rank of an engine. Same shapes and dtypes on every rank. On other ranks than
                ``source``, the parts that this rank gets are written in place. A trainer gets all parts.
            source: Training rank that sends.

        Returns:
            A function that waits for the broadcast. Call it before the tensors are used or freed. On a CPU it blocks
            until they have arrived. On a GPU it makes the current stream wait, and `flush` blocks.

        Raises:
            WeightSyncError: If a peer is gone or the timeout passed. The group is then closed. The returned function
                raises it, too. One rank can succeed where another fails, so the trainers must agree on the outcome over
                the training world.
        """
        self._check_open()
        failure = self._await_earlier()
        try:
            for part, group in self._groups.items() if failure is None else ():
                if parts[part].numel():
                    self._works.append(group.broadcast(parts[part], source))
                    self._started += 1
        except RuntimeError as error:
            failure = _failure(error)
        if failure is None:
            return partial(self._finish, self._started)
        raise self._abort_with(failure)

    def _await_earlier(self) -> Failure | None:
        """Waits on a GPU until few broadcasts are under way; returns a failure if they do not end in time."""
        deadline, began_s = self._deadline.at_most(_SYNC_SHARE * self._sync_timeout), time.monotonic()
        try:
            while len(self._under_way) > _AHEAD * len(self._groups):
                if self._under_way[0].is_completed():
                    self._under_way.popleft()
                elif deadline.expired:
                    return _timed_out(time.monotonic() - began_s)
                else:
                    time.sleep(_POLL_S)
        except RuntimeError as error:
            return _failure(error)
        return None

    def _finish(self, number: int) -> None:
        """Waits for the first ``number`` broadcasts."""
        self._check_open()
        failure = None
        while failure is None and len(self._works) > self._started - number:
            try:
                if self._device.type == "cuda":
                    self._under_way.append(self._works.popleft())
                    self._under_way[-1].wait()
                else:
                    self._works.popleft().wait()
            except RuntimeError as error:
                failure = _failure(error)
        # Raise outside the except block: the exception's traceback would keep the connections open.
        if failure is not None:
            raise self._abort_with(failure)

    def _check_open(self) -> None:
        if not self._groups:
            raise WeightSyncError(f"joint rank {self.joint_rank}: the joint group is closed")

    def _abort_with(self, failure: Failure) -> WeightSyncError:
        # Ranks that wait for this one then fail at once, and not at the timeout.
        self.abort()
        text = f"joint rank {self.joint_rank}: broadcast over the joint group failed: {failure.text}"
        return WeightSyncError(text, foreign=failure.foreign)

    def flush(self, timeout: timedelta | None = None) -> None:
        """Waits on a GPU until everything broadcast so far has arrived. Collective over: the joint group.

        Args:
            timeout: Longest wait; None for most of ``sync_timeout``. The wait then ends before a collective of the
                training world, queued behind these broadcasts on the same stream, times out.

        Raises:
            WeightSyncError: If it takes longer, e.g. because a peer is gone. NCCL does not notice that. The group is
                then closed.
        """
        self._check_open()
        if self._device.type == "cuda" and (failure := self._wait(timeout or _SYNC_SHARE * self._sync_timeout)):
            text = f"joint rank {self.joint_rank}: broadcasts over the joint group {failure.text}"
            raise WeightSyncError(text, foreign=failure.foreign)

    def _wait(self, timeout: timedelta) -> Failure | None:
        """Waits for the current stream. If that fails, gives up the group and returns the failure."""
        try:
            if wait_for_stream(self._device, timeout):
                self._under_way.clear()
                return None
            failure = _timed_out(timeout.total_seconds())
        except RuntimeError as error:
            failure = _failure(error)
        self.abort()
        return failure

    def limit(self, timeout: timedelta) -> None:
        """Sets a limit for the sum of all waits in `broadcast` from now on, until the next call."""
        self._deadline = Deadline.after(timeout)

    def abort(self) -> None:
        """Gives up the group and its unfinished operations. Not collective; waits for 10 s at most; idempotent."""
        groups, self._groups = self._groups, {}
        self._works.clear()
        self._under_way.clear()
        if self._device.type == "cuda":
            # Abort all groups at once: an abort may wait for a kernel that waits for another communicator
            # (pytorch#119797).
            aborts = [Background(group.abort, name="aborting a joint group") for group in groups.values()]
            deadline = Deadline.after(_ABORT_S)
            for abort in aborts:
                try:
                    abort.wait(deadline)
                except (RuntimeError, DeadlineExceededError) as error:
                    logger.warning("joint rank %d: aborting the joint group: %s", self.joint_rank, first_line(error))
        elif groups:
            for group in groups.values():
                group.shutdown()
            del group
            # Drop the last references on a thread: gloo waits there until the timeout of an unfinished broadcast.
            Background(groups.clear, name="leaving the joint group")

    def close(self) -> None:
        """Leaves the group. Not collective; idempotent."""
        # Connections close with the last reference; shutdown alone leaves them open.
        groups, self._groups = self._groups, {}
        self._works.clear()
        self._under_way.clear()
        for group in groups.values():
            group.shutdown()


def _members_of_parts(members: Sequence[RankId], parts: int) -> list[list[int]]:
    """Returns the joint ranks of each part: all trainers, and the rollout ranks that get it."""
    return [
        [rank for rank, one in enumerate(members) if one.role is Role.TRAINER or one.rank % parts == part]
        for part in range(parts)
    ]


def two_buffers(size_bytes: int, device: torch.device) -> list[torch.Tensor]:
    """Returns two buffers, ``[size_bytes]`` of uint8."""
    return [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]


def _timed_out(seconds: float) -> Failure:
    text = f"timed out after {seconds:.1f} s: a peer is gone, or raise {timeout_setting(Phase.SYNC)}"
    return Failure(text, foreign=ForeignCause.TIMEOUT)


def _failure(error: Exception) -> Failure:
    return Failure(first_line(error), foreign=foreign_cause(error))


def wait_for_stream(device: torch.device, timeout: timedelta) -> bool:
    """Waits for the work on a GPU's current stream; returns True if the work ended in time.

    Raises RuntimeError if the device has failed. It polls, because torch's own waits have no deadline.
    """
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    deadline = Deadline.after(timeout)
    while not done.query():
        if deadline.expired:
            return False
        time.sleep(_POLL_S)
    return True
