"""A training rank and a rollout rank on the same GPU. Weights pass through memory that both have mapped.

NCCL refuses two ranks on one device, and the pair needs no network. In each sync, the trainer shares its buffers
with the rollout rank (CUDA IPC), which loads weights straight out of them. The two agree over a socket of their own
(`LocalChannel`) on which of them may use which buffer.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.failure import Failure
from rl_safe_workers.control.local_channel import Greeting, LocalChannel, LocalListener
from rl_safe_workers.control.plane import ControlPlane, Mailbox
from rl_safe_workers.errors import CommunicatorError, RlSafeError, WeightSyncError, first_line
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.foreign_files import printable
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role
from rl_safe_workers.worlds.joint_group import CONNECT_SHARE, LATE, compare_outcomes

BUFFERS = 3
"""Number of buffers. While the rollout rank loads out of one, the trainer's GPU fills another, and the trainer launches
the copies into the third."""
_MEMORY = "memory"
"""Name of the message with the handle of the buffers."""
_ADDRESS = "address"
"""Name of the message in the run's store with the address of the trainer's socket."""
_HANDLE_KEYS = ("handle", "size", "offset", "counter", "counter_offset", "event", "waits_for_event")
"""The fields of ``UntypedStorage._share_cuda_`` after the device, seen in torch 2.11 to 2.13. Each rank uses a device
index of its own."""
_COUNTER_FILE = re.compile(rb"/torch_\d+_\d+_\d+")
"""Name in shared memory of torch's reference counters (CudaIPCTypes.cpp). No other file may be opened as one."""
_COUNTERS = 10_000
"""Number of counters in such a file (CUDA_IPC_REF_COUNTER_FILE_SIZE in CudaIPCTypes.h)."""
_LONGEST_HANDLE = 4096
"""Longest handle in bytes. A CUDA IPC handle has 65, with torch's leading byte. Expandable segments need more."""


class GpuPair:
    """One side of a pair, with the methods of `JointGroup` that a weight sync uses. Pairs are independent.

    Attributes:
        sends: True on the trainer.
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
        """Joins the pair. Collective over: all ranks of ``control``.

        Args:
            control: This process's place in the world `joint_group.joint_world`. Trainers come first, then rollout
                ranks. Both are paired in order.
            generation: Counts rebuilds; each uses store keys of its own.
            timeout: Longest wait for the others.
            device: The GPU.
            sync_timeout: Longest wait for the other side in a sync; None for ``timeout``.
            parts: Unused, because the rollout rank has all buffers mapped. `JointGroup` has this argument.

        Raises:
            PhaseTimeoutError: Naming the ranks that did not come in time.
            WeightSyncError: If the ranks do not make pairs. On every rank, if the two of a pair cannot connect, for
                example because they are on two machines; names one of them.
        """
        joint_rank, size = control.rank, control.size
        trainers = sum(one.role is Role.TRAINER for one in control.members)
        if size != 2 * trainers:
            raise WeightSyncError(f"{size} joint ranks do not make pairs: give each trainer one rollout rank")
        self.joint_rank, self.sends, self._device = joint_rank, joint_rank < trainers, device
        self._timeout = sync_timeout or timeout
        deadline = Deadline.after(timeout)
        control.barrier(Phase.JOINT, deadline)
        mailbox = control.mailbox(f"pair/{generation}/{joint_rank % trainers}")
        self._channel = _joined(control, mailbox, deadline, listens=self.sends)
        self._turn, self._deadline = 0, Deadline.after(math.inf)
        self._untold = deque[tuple[int, Callable[[], None]]]()
        """On the trainer, the last turns that the rollout rank does not know of. Each has a function that waits until
        its buffer is filled."""
        self._unread: list[int] = []
        """The turns that the rollout rank has not confirmed yet, the oldest first."""
        self._is_open = True
        self._shared: torch.Tensor | None = None
        """The memory of all buffers in this sync."""

    @property
    def is_open(self) -> bool:
        """True if the pair can be used."""
        return self._is_open

    has_all_parts = True
    """See `JointGroup.has_all_parts`."""

    def buffers(self, size_bytes: int) -> list[torch.Tensor]:
        """Shares memory for the broadcasts until the next `flush`. Collective over: the pair.

        The rollout rank must drop all references to the buffers before `flush`, so that the trainer can free them.

        Args:
            size_bytes: Size of each buffer, the same on both sides.

        Returns:
            `BUFFERS` buffers, ``[size_bytes]`` of uint8. Broadcasts must use them in turn, from their beginning.

        Raises:
            RuntimeError: On the trainer, if there is no room. It is torch's own error.
            WeightSyncError: If the memory cannot be shared, or the other side does not come.
        """
        shared = self._allocate(BUFFERS * size_bytes) if self.sends else None
        with self._working("could not share memory with its pair"):
            if shared is None:
                shared = self._map(BUFFERS * size_bytes)
            else:
                self._offer(shared)
        self._shared = shared
        return [shared[number * size_bytes :][:size_bytes] for number in range(BUFFERS)]

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def _offer(self, shared: torch.Tensor) -> None:
        self._send(_MEMORY, describe_memory(shared).encode())

    def _map(self, size_bytes: int) -> torch.Tensor:
        return map_memory(self._receive(_MEMORY), size_bytes=size_bytes, device=self._device)

    def broadcast(self, *parts: torch.Tensor, source: int) -> Callable[[], None]:
        """Passes a buffer from the trainer to its rollout rank. Collective over: the pair.

        The trainer waits for its GPU one call later. So its GPU does not idle until the trainer's next call.

        Args:
            parts: The next of `buffers`, or consecutive parts from its beginning. The trainer's current stream fills
                them.
            source: Unused, because the trainer always sends. `JointGroup.broadcast` has this argument.

        Returns:
            A function to call before the buffer is used: on the rollout rank it waits until the buffer is filled, and
            on the trainer until the rollout rank has loaded it. The rollout rank must have started to load a buffer
            before it waits for a later one, calls `broadcast` for the same buffer again, or calls `flush`.

        Raises:
            WeightSyncError: If the other side does not keep up. The pair is then closed. The returned function raises
                it, too.
        """
        turn, self._turn = self._turn, self._turn + 1
        with self._working():
            if self.sends:
                self._untold.append((turn, _filled(parts[0])))
                self._tell(behind=1)
            else:
                self._confirm(behind=BUFFERS - 1)
        self._unread.append(turn)
        return partial(self._await_reader if self.sends else self._await_trainer, turn)

    def _await_reader(self, turn: int) -> None:
        with self._working():
            self._take_confirmations(up_to=turn)

    def _await_trainer(self, turn: int) -> None:
        with self._working():
            # The trainer may wait for these confirmations before it announces this turn.
            self._confirm(behind=sum(each >= turn for each in self._unread))
            self._receive(f"filled/{turn}")

    @contextmanager
    def _working(self, failed: str = "its pair did not keep up") -> Iterator[None]:
        """Closes the pair if the other side does not keep up, or the device fails."""
        if not self._is_open:
            raise WeightSyncError(f"joint rank {self.joint_rank}: the pair is closed")
        try:
            yield
        except (RuntimeError, CommunicatorError, WeightSyncError) as error:
            self.close()
            raise WeightSyncError(f"joint rank {self.joint_rank}: {failed}: {first_line(error)}") from error

    def _send(self, name: str, contents: bytes = b"") -> None:
        self._channel.send(name, contents, self._soon())

    def _receive(self, name: str, timeout: timedelta | None = None) -> bytes:
        return self._channel.receive(name, self._soon(timeout))

    def _soon(self, timeout: timedelta | None = None) -> Deadline:
        return Deadline.after(min(timeout or self._timeout, self._deadline.remaining()))

    def _tell(self, *, behind: int) -> None:
        """Waits until all but the last ``behind`` buffers are filled, and tells the rollout rank."""
        while len(self._untold) > behind:
            turn, wait = self._untold.popleft()
            wait()
            self._send(f"filled/{turn}")

    def _take_confirmations(self, *, up_to: int, timeout: timedelta | None = None) -> None:
        """Waits until the rollout rank has loaded all turns up to ``up_to``."""
        while self._unread and self._unread[0] <= up_to:
            if self._untold and self._untold[0][0] <= self._unread[0]:
                self._tell(behind=0)
            self._receive(f"read/{self._unread[0]}", timeout)
            del self._unread[0]

    def _confirm(self, *, behind: int) -> None:
        """Tells the trainer which buffers have been loaded: all but the last ``behind``."""
        if len(self._unread) > behind and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        while len(self._unread) > behind:
            self._send(f"read/{self._unread.pop(0)}")

    def limit(self, timeout: timedelta) -> None:
        """Sets a limit for the sum of all waits from now on, until the next call.

        Without it, each turn may wait for ``sync_timeout``, and there may be many turns.
        """
        self._deadline = Deadline.after(timeout)

    def flush(self, timeout: timedelta | None = None) -> None:
        """Waits until the rollout rank has loaded everything that was passed so far. Drops the shared memory.

        Collective over: the pair.

        Args:
            timeout: Longest wait for each of at most `BUFFERS` turns; None for ``sync_timeout``. The `limit` also
                applies.

        Raises:
            WeightSyncError: If the other side does not keep up. The pair is then closed.
        """
        with self._working():
            if self.sends:
                self._tell(behind=0)
                self._take_confirmations(up_to=self._turn, timeout=timeout)
                self._shared = None
            else:
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
                # Drop it before the trainer frees the memory: torch keeps memory that another process has mapped.
                self._shared = None
                self._confirm(behind=0)

    def close(self) -> None:
        """Gives up the pair and the memory. The other side fails at once. Not collective; idempotent."""
        self._is_open, self._shared = False, None
        self._untold.clear()
        self._channel.close()

    abort = close


def _joined(control: ControlPlane, mailbox: Mailbox, deadline: Deadline, *, listens: bool) -> LocalChannel:
    """Connects the two sides of each pair. Raises on every rank if a pair cannot connect."""
    channel, failure = None, None
    try:
        channel = _connect(mailbox, deadline.share(CONNECT_SHARE), listens=listens)
    except (CommunicatorError, OSError) as error:
        failure = Failure.of(error)
        if failure.foreign is ForeignCause.TIMEOUT:
            failure = replace(failure, text=LATE)
    try:
        compare_outcomes(control.begin("connected", phase=Phase.JOINT), failure, deadline)
    except RlSafeError:
        if channel is not None:
            channel.close()
        raise
    assert channel is not None, "otherwise this rank has raised its failure"
    return channel


def _connect(mailbox: Mailbox, deadline: Deadline, *, listens: bool) -> LocalChannel:
    """Connects the two sides of a pair. The trainer listens, and tells the address over the run's store."""
    of_trainer, of_rollout = mailbox.signature("trainer"), mailbox.signature("rollout")
    if listens:
        with LocalListener() as listener:
            mailbox.leave(_ADDRESS, listener.address.encode())
            return listener.accept(Greeting(ours=of_trainer, theirs=of_rollout), deadline)
    address = mailbox.take(_ADDRESS, deadline)
    if address is None:
        raise CommunicatorError("the trainer of this pair does not listen", foreign=ForeignCause.TIMEOUT)
    return LocalChannel.connect(address.decode(), Greeting(ours=of_rollout, theirs=of_trainer), deadline)


def describe_memory(shared: torch.Tensor) -> str:
    """Returns the CUDA IPC handle of a GPU tensor as JSON, for `map_memory` in another process."""
    fields: Any = shared.untyped_storage()._share_cuda_()[1:]  # type: ignore[no-untyped-call]
    plain = [field.hex() if isinstance(field, bytes) else field for field in fields]
    return json.dumps(dict(zip(_HANDLE_KEYS, plain, strict=True)))


def map_memory(described: bytes, *, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Maps the memory of another process on the same GPU.

    The text is data: nothing in it names a function, and every field is checked before CUDA sees it.

    Args:
        described: The text that `describe_memory` returned.
        size_bytes: Size that the memory must have.
        device: The GPU.

    Returns:
        The memory, ``[size_bytes]``, uint8.

    Raises:
        WeightSyncError: If the text is not from `describe_memory`, or describes other memory.
        RuntimeError: If CUDA cannot map the memory.
    """
    try:
        handle, size, offset, counter, counter_offset, event = _handle_fields(described)
        if size != size_bytes or not (0 <= offset < 2**48 and 0 <= counter_offset < _COUNTERS):
            raise ValueError(f"size {size}, offset {offset}, counter {counter_offset}")
        if _COUNTER_FILE.fullmatch(counter) is None:
            raise ValueError(f"reference counters in {counter!r}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise WeightSyncError(
            f"the message {_MEMORY!r} holds no handle of the pair's memory "
            f"({type(error).__name__}: {printable(str(error))[:200]})"
        ) from None
    torch.cuda.init()  # type: ignore[no-untyped-call]
    # Ignore the event: torch would open it in each sync and never close it. The memory has not been written yet.
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0, handle, size, offset, counter, counter_offset, event, False
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _handle_fields(described: bytes) -> tuple[bytes, int, int, bytes, int, bytes]:
    fields = json.loads(described.decode("ascii"))
    if set(fields) != set(_HANDLE_KEYS):
        raise ValueError(f"its fields are {sorted(fields)}")
    numbers = [fields[name] for name in ("size", "offset", "counter_offset")]
    handles = [bytes.fromhex(fields[name]) for name in ("handle", "counter", "event")]
    if {*map(type, numbers)} != {int} or type(fields["waits_for_event"]) is not bool:
        raise TypeError("a field is of another type")
    if max(map(len, handles)) > _LONGEST_HANDLE:
        raise ValueError(f"a handle has more than {_LONGEST_HANDLE} bytes")
    return handles[0], numbers[0], numbers[1], handles[1], numbers[2], handles[2]


def _filled(tensor: torch.Tensor) -> Callable[[], None]:
    """Returns a function that waits for all work so far on the current stream of a tensor's GPU."""
    if not tensor.is_cuda:
        return lambda: None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event.synchronize  # type: ignore[no-any-return]
