"""A training rank and a rollout rank on the same GPU. Weights pass through memory that both have mapped.

NCCL refuses two ranks on one device, and the pair needs no network. The trainer shares a buffer with the rollout rank
(CUDA IPC). The two agree over the run's store on which of them may use which half of the buffer.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import CommunicatorError, WeightSyncError, first_line
from rl_safe_workers.foreign_errors import ForeignCause
from rl_safe_workers.foreign_files import printable
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role

HALF_BYTES = 64 * 2**20
"""Size of each half of the buffer. The reader reads one half while the trainer fills the other."""
MEMORY_KEY = "memory"
"""Key of the buffer's handle in the store of the pair."""
_HANDLE_KEYS = ("handle", "size", "offset", "counter", "counter_offset", "event", "waits_for_event")
"""The fields of ``UntypedStorage._share_cuda_`` after the device, seen in torch 2.11 to 2.13. Each rank uses a device
index of its own."""
_COUNTER_FILE = re.compile(rb"/torch_\d+_\d+_\d+")
"""Name in shared memory of torch's reference counters (CudaIPCTypes.cpp). No other file may be opened as such."""
_COUNTERS = 10_000
"""Number of counters in such a file (CUDA_IPC_REF_COUNTER_FILE_SIZE in CudaIPCTypes.h)."""
_LONGEST_HANDLE = 4096
"""Longest handle in bytes. A CUDA IPC handle has 65, with torch's leading byte. Expandable segments need more."""


class GpuPair:
    """One side of a pair, with the methods of `JointGroup` that a weight sync uses. Pairs are independent."""

    def __init__(
        self,
        control: ControlPlane,
        *,
        generation: int,
        timeout: timedelta,
        device: torch.device,
        sync_timeout: timedelta | None = None,
    ) -> None:
        """Joins. Collective over: all ranks of ``control``, for the barrier.

        Args:
            control: This process's place in the world `joint_group.joint_world`: trainers first, then rollout ranks,
                which are paired in order.
            generation: Counts rebuilds; each uses store keys of its own.
            timeout: Longest wait for the others.
            device: The GPU.
            sync_timeout: Longest wait for the other side in a sync; None for ``timeout``.

        Raises:
            PhaseTimeoutError: Naming the ranks that did not come in time.
            WeightSyncError: If the memory cannot be shared.
        """
        joint_rank, size = control.rank, control.size
        trainers = sum(one.role is Role.TRAINER for one in control.members)
        if size != 2 * trainers:
            raise WeightSyncError(f"{size} joint ranks do not make pairs: give each trainer one rollout rank")
        pairs = trainers
        self.joint_rank, self._sends = joint_rank, joint_rank < pairs
        self._timeout = sync_timeout or timeout
        control.barrier(Phase.JOINT, Deadline.after(timeout))
        self._mailbox = control.mailbox(f"pair/{generation}/{joint_rank % pairs}")
        self._turn, self._deadline = 0, Deadline.after(math.inf)
        self._unread: list[str] = []
        """Keys of the last turns, which the reader sets once it has read."""
        self._shared: torch.Tensor | None = None
        try:
            self._shared = self._share(device) if self._sends else self._map(device, timeout)
        except (RuntimeError, CommunicatorError) as error:
            reason = first_line(error)
            raise WeightSyncError(f"joint rank {joint_rank} could not share memory with its pair: {reason}") from error

    def _share(self, device: torch.device) -> torch.Tensor:
        if device.type == "cuda":
            # Else the buffer may be cut out of a large free block, which torch could then never release.
            torch.cuda.empty_cache()
        shared = torch.empty(2 * HALF_BYTES, dtype=torch.uint8, device=device)
        self._mailbox.leave(MEMORY_KEY, describe_memory(shared).encode())
        return shared

    def _map(self, device: torch.device, timeout: timedelta) -> torch.Tensor:
        return map_memory(self._take(MEMORY_KEY, timeout), size_bytes=2 * HALF_BYTES, device=device)

    @property
    def is_open(self) -> bool:
        """True if the memory is still shared."""
        return self._shared is not None

    def broadcast(self, tensor: torch.Tensor, *, source: int) -> Callable[[], None]:
        """Passes a contiguous tensor from the trainer to its rollout rank. Collective over: the pair.

        Args:
            tensor: Same size on both sides; written in place on the rollout rank.
            source: Unused, because the trainer always sends. `JointGroup.broadcast` has this argument.

        Returns:
            A function that does nothing, as the counterpart of `JointGroup.broadcast`: the tensor can be used at once.

        Raises:
            WeightSyncError: If the other side does not keep up. The memory is then given up.
        """
        with self._working() as shared:
            flat = tensor.view(-1).view(torch.uint8)
            for start in range(0, flat.numel(), HALF_BYTES):
                self._pass(flat[start : start + HALF_BYTES], shared)
        return _nothing

    @contextmanager
    def _working(self) -> Iterator[torch.Tensor]:
        """Yields the memory; gives it up if the other side does not keep up, or the device fails."""
        if self._shared is None:
            raise WeightSyncError(f"joint rank {self.joint_rank}: the memory of the pair is closed")
        try:
            yield self._shared
        except (RuntimeError, CommunicatorError) as error:
            self.close()
            reason = first_line(error)
            raise WeightSyncError(f"joint rank {self.joint_rank}: its pair did not keep up: {reason}") from error

    def _pass(self, block: torch.Tensor, shared: torch.Tensor) -> None:
        half = shared[self._turn % 2 * HALF_BYTES :][: block.numel()]
        filled, read = f"filled/{self._turn}", f"read/{self._turn}"
        if self._sends:
            # The half is free once the reader has read its contents of two turns ago.
            self._wait_for_reader(behind=1)
            half.copy_(block)
            _synchronize(block)
            self._mailbox.leave(filled)
            self._unread.append(read)
        else:
            self._take(filled)
            block.copy_(half)
            _synchronize(block)
            self._mailbox.leave(read)
        self._turn += 1

    def _take(self, key: str, timeout: timedelta | None = None) -> bytes:
        """Waits for a message to this side, returns and removes it.

        Raises:
            CommunicatorError: If it does not come in time.
        """
        deadline = self._deadline.at_most(timeout or self._timeout)
        started_s = time.monotonic()
        message = self._mailbox.take(key, deadline)
        if message is None:
            text = f"wait timeout after {time.monotonic() - started_s:.1f} s, waiting for {key!r}"
            raise CommunicatorError(text, foreign=ForeignCause.TIMEOUT)
        return message

    def _wait_for_reader(self, *, behind: int, timeout: timedelta | None = None) -> None:
        """Waits until at most ``behind`` turns are unread."""
        while len(self._unread) > behind:
            self._take(self._unread[0], timeout)
            del self._unread[0]

    def limit(self, timeout: timedelta) -> None:
        """Sets a limit for the sum of all waits from now on, until the next call.

        Without it, each turn may wait for ``sync_timeout``, and there may be many turns.
        """
        self._deadline = Deadline.after(timeout)

    def flush(self, timeout: timedelta | None = None) -> None:
        """Waits until the rollout rank has read everything that was passed so far.

        Args:
            timeout: Longest wait for each of at most two turns; None for ``sync_timeout``. The `limit` also applies.

        Raises:
            WeightSyncError: If the other side does not keep up. The memory is then given up.
        """
        with self._working():
            self._wait_for_reader(behind=0, timeout=timeout)

    def close(self) -> None:
        """Gives up the memory. Not collective; idempotent."""
        self._shared = None

    abort = close


def describe_memory(shared: torch.Tensor) -> str:
    """Returns the CUDA IPC handle of a GPU tensor as JSON, for `map_memory` in another process."""
    fields: Any = shared.untyped_storage()._share_cuda_()[1:]  # type: ignore[no-untyped-call]
    plain = [field.hex() if isinstance(field, bytes) else field for field in fields]
    return json.dumps(dict(zip(_HANDLE_KEYS, plain, strict=True)))


def map_memory(described: bytes, *, size_bytes: int, device: torch.device) -> torch.Tensor:
    """Maps the memory of another process on the same GPU.

    The text is data: nothing in it names a function, and every field is checked before CUDA sees it.

    Args:
        described: Text of `describe_memory`.
        size_bytes: Size that the memory must have.
        device: The GPU.

    Returns:
        The memory, ``[size_bytes]``, uint8.

    Raises:
        WeightSyncError: If the text is not of `describe_memory`, or describes other memory.
        RuntimeError: If CUDA does not map it.
    """
    try:
        handle, size, offset, counter, counter_offset, event, waits = _handle_fields(described)
        if size != size_bytes or not (0 <= offset < 2**48 and 0 <= counter_offset < _COUNTERS):
            raise ValueError(f"size {size}, offset {offset}, counter {counter_offset}")
        if _COUNTER_FILE.fullmatch(counter) is None:
            raise ValueError(f"reference counters in {counter!r}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise WeightSyncError(
            f"key {MEMORY_KEY!r} of the run's store holds no handle of the pair's memory "
            f"({type(error).__name__}: {printable(str(error))[:200]}): somebody else has written to the store"
        ) from None
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0, handle, size, offset, counter, counter_offset, event, waits
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _handle_fields(described: bytes) -> tuple[bytes, int, int, bytes, int, bytes, bool]:
    fields = json.loads(described.decode("ascii"))
    if set(fields) != set(_HANDLE_KEYS):
        raise ValueError(f"its fields are {sorted(fields)}")
    numbers = [fields[name] for name in ("size", "offset", "counter_offset")]
    handles = [bytes.fromhex(fields[name]) for name in ("handle", "counter", "event")]
    if {*map(type, numbers)} != {int} or type(fields["waits_for_event"]) is not bool:
        raise TypeError("a field is of another type")
    if max(map(len, handles)) > _LONGEST_HANDLE:
        raise ValueError(f"a handle has more than {_LONGEST_HANDLE} bytes")
    return handles[0], numbers[0], numbers[1], handles[1], numbers[2], handles[2], fields["waits_for_event"]


def _nothing() -> None:
    pass


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
