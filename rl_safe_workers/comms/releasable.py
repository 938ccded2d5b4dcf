"""Process groups whose communicators can be dropped and made anew while everyone keeps the same group object.

A plain group is useless once its backend is shut down, and model and optimizer keep references to their groups. So the
group here is a thin object that passes each collective to an inner, plain group of torch. A release drops the inner
group, with its connections and device memory. A rebuild makes the next *generation* of the inner group.

    register_backend("gloo")  ->  "rl_safe_gloo"   CPU tensors over gloo, released
    register_backend("nccl")  ->  "rl_safe_nccl"   CUDA tensors over NCCL, released; CPU tensors over gloo, kept

Pass such a name to ``init_process_group``, and every later ``new_group`` inherits it. Do not combine it with backends
by device (``"cpu:gloo,cuda:..."``), because torch replaces the whole group by a backend that is written in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import StrEnum
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from rl_safe_workers.comms.channel import Channel
from rl_safe_workers.errors import CommunicatorError

STORE_PREFIX = "rl_safe_generation"
"""Keys of a generation's rendezvous are under ``<STORE_PREFIX>/<group name>/<generation>``."""

FORWARDED = frozenset(
    {
        *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier"),
        *("allgather", "allgather_coalesced", "gather", "scatter", "reduce_scatter", "alltoall"),
        *("send", "recv", "recv_anysource"),
        # The same operation: its name in torch 2.11, and its name in 2.13.
        *("_allgather_base", "all_gather_single"),
        *("_reduce_scatter_base", "reduce_scatter_single"),
        *("alltoall_base", "all_to_all_single"),
        *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    }
)
"""Methods of a group that go to the inner group, as far as the installed torch has them."""

_KEPT_FROM_TORCH = frozenset(
    {"rank", "size", "name", "boxed", "unbox", "bound_device_id"}
    | {"_id", "_backend_id", "_get_backend_name", "_pybind11_conduit_v1_", "BackendType"}
)
"""Attributes that torch's own class provides without a backend."""


class GroupState(StrEnum):
    """The states of a group."""

    CONNECTED = "connected"
    """It has a generation, which does the collectives."""
    RELEASED = "released"
    """It has no generation until the next rebuild."""
    CLOSED = "closed"
    """It was destroyed or aborted, for good."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class ReleasableGroup(dist.ProcessGroup):
    """A torch process group that outlives its communicators. Only torch makes it, see `register_backend`.

    Every collective in `FORWARDED` goes to the inner group. It raises CommunicatorError if the group is released or
    closed. Every other collective of torch's groups always raises CommunicatorError.

    Attributes:
        members: Ranks of the members in the default group, in group order.
        generation: Number of the latest generation; 0 at the group's creation.
        serial: Grows with each group of this process. It gives the order of creation, which agrees among all members.
    """

    _created = 0

    def __init__(self, backend: str, base: Any, options: Any) -> None:
        """Connects generation 0, as a plain group of torch does. Collective over: the group.

        Args:
            backend: ``"gloo"`` or ``"nccl"``: the backend that a release drops.
            base: torch's ``_DistributedBackendOptions``.
            options: ``pg_options`` of ``init_process_group`` or ``new_group``; None for torch's own.
        """
        # Python cannot subclass a group that torch's constructor makes with a store.
        super().__init__(base.group_rank, base.group_size)  # type: ignore[call-arg]
        ReleasableGroup._created += 1
        self.serial, self.generation = ReleasableGroup._created, 0
        self._torch_name, self._desc = str(base.group_id), ""
        self._store: Store = base.store
        self.members = tuple(base.global_ranks_in_group) or tuple(range(base.group_size))
        self._state, self._missing_call = GroupState.CONNECTED, "rebuild()"
        device = "cuda" if backend == "nccl" else "cpu"
        self._released_channel = Channel(device, backend, kept=False, timeout=base.timeout, options=options)
        self.channels = {device: self._released_channel}
        if device != "cpu":
            self.channels["cpu"] = Channel("cpu", "gloo", kept=True, timeout=base.timeout, options=None)
        for channel in self.channels.values():
            self._connect(channel, base.timeout)

    # Methods for the rest of this package.

    @property
    def state(self) -> GroupState:
        """Connected, released or closed."""
        return self._state

    @property
    def key(self) -> str:
        """Torch's name of the group, the same on all ranks."""
        return self._torch_name

    @property
    def label(self) -> str:
        """Its name in messages, e.g. ``"TENSOR_MODEL_PARALLEL_GROUP [0, 1]"``."""
        return f"{self._desc or self.key} {list(self.members)}"

    @property
    def timeout(self) -> timedelta:
        """Longest wait of one collective."""
        return self._released_channel.timeout

    def pending_works(self) -> list[Any]:
        """Returns the unfinished CPU works that a caller still references. It cannot list work queued on a GPU."""
        works = self.channels["cpu"].pending if "cpu" in self.channels else ()
        return [work for work in works if not work.is_completed()]

    def detach(self, *, missing_call: str = "rebuild()") -> Any:
        """Releases the group; the caller ends the communicators. Not collective; idempotent.

        Args:
            missing_call: The call that makes the group usable again, for the error of a caller that uses it before.

        Returns:
            torch's backend of the dropped generation, or None if there was none. Its ``shutdown`` ends the
            communicators, on NCCL together with the other members; ``abort`` ends them without the others. Gloo's
            connections end with the last reference.
        """
        if self._state is not GroupState.CONNECTED:
            return None
        self._state, self._missing_call = GroupState.RELEASED, missing_call
        return self._released_channel.detach()

    def reconnect(self, generation: int, *, bound: timedelta) -> None:
        """Makes the next generation of a released group. Collective over: the group, with gloo; not with NCCL.

        Args:
            generation: Its number, the same on all members and higher than any before.
            bound: Longest wait for the others.

        Raises:
            CommunicatorError: If the group is not released.
            RuntimeError: torch's, if the others cannot be reached in time.
        """
        if self._state is not GroupState.RELEASED:
            raise CommunicatorError(f"group {self.label} is {self._state} and cannot be rebuilt: release it first")
        self.generation = generation
        self._connect(self._released_channel, bound)
        self._state = GroupState.CONNECTED

    def limit(self, timeout: timedelta | None) -> None:
        """Sets a temporary timeout for collectives of the current generation; None restores the group's own timeout."""
        channel = self._released_channel
        channel.limit(channel.timeout if timeout is None else min(timeout, channel.timeout))

    def _connect(self, channel: Channel, bound: timedelta) -> None:
        generation = "kept" if channel.kept else str(self.generation)
        store = PrefixStore(f"{STORE_PREFIX}/{self.key}/{generation}", self._store)
        channel.connect(store, self.rank(), self.size(), name=self.key, members=self.members, bound=bound)
        # torch sets a group's description only after its creation.
        if channel.inner is not None and self._desc:
            channel.inner._set_group_desc(self._desc)

    # Methods for torch.

    def _channel_for(self, op: str, device: str) -> Channel:
        channel = self.channels.get(device)
        if channel is None:
            raise CommunicatorError(
                f"{op} on group {self.label}: it carries {' and '.join(self.channels)} tensors, not {device}"
            )
        return channel

    def _inner_for(self, op: str, channel: Channel) -> Any:
        if channel.inner is not None:
            return channel.inner
        if self._state is GroupState.CLOSED:
            raise CommunicatorError(f"{op} on group {self.label}: the group was destroyed")
        raise CommunicatorError(
            f"{op} on group {self.label}: its communicators were released, and would be made again in memory that is "
            f"promised to the rollout; call {self._missing_call} first"
        )

    def _device_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        first = args[0] if args else None
        while isinstance(first, list) and first:
            first = first[0]
        if isinstance(first, torch.Tensor):
            return first.device.type
        # In a gather, only the root has an output; a barrier has no tensor at all.
        values = [*args, *kwargs.values()]
        tensor = next(_tensors(values), None)
        if tensor is not None:
            return tensor.device.type
        named = next((d for d in (getattr(v, "device", None) for v in values) if d is not None), None)
        return str(named.type) if named is not None else self._released_channel.device

    def _forward(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        channel = self._channel_for(op, self._device_of(args, kwargs))
        inner = channel.inner if channel.inner is not None else self._inner_for(op, channel)
        work = getattr(inner, op)(*args, **kwargs)
        if channel.device == "cpu" and work is not None:
            channel.pending.add(work)
        return work

    @torch.compiler.disable
    def _start_coalescing(self, device: torch.device) -> None:
        channel = self._channel_for("_start_coalescing", device.type)
        self._inner_for("_start_coalescing", channel)._start_coalescing(device)

    @torch.compiler.disable
    def _end_coalescing(self, device: torch.device) -> Any:
        channel = self._channel_for("_end_coalescing", device.type)
        return self._inner_for("_end_coalescing", channel)._end_coalescing(device)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self.channels]

    def _get_backend(self, device: torch.device) -> Any:
        # torch asks for a GPU's backend even if there is none, and expects a RuntimeError then.
        if device.type not in self.channels:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self.channels[device.type].view

    # torch's own class stores name and description in its backends, but this class has no backends.

    @property
    def group_name(self) -> Any:
        """Torch's name of the group, and of its inner group."""
        return self._torch_name

    @property
    def group_desc(self) -> str:
        """Description of the group and of its inner group, e.g. ``"TENSOR_MODEL_PARALLEL_GROUP"``."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._torch_name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        for channel in self.channels.values():
            if channel.inner is not None:
                channel.inner._set_group_desc(desc)

    # Methods that C++ calls.

    def getBackendName(self) -> str:  # noqa: D102, N802
        return backend_name(self._released_channel.backend)

    def getGroupName(self) -> str:  # noqa: D102, N802
        return self._torch_name

    def getGroupDesc(self) -> str:  # noqa: D102, N802
        return self._desc

    def get_group_store(self) -> Store:
        """Returns the store with which torch made the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of every later collective, also in later generations."""
        for channel in self.channels.values():
            channel.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        inner = self._inner_for("_get_sequence_number_for_group", self._released_channel)
        return int(inner._get_sequence_number_for_group())

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: each generation starts its sequence numbers at 0."""

    def _has_hooks(self) -> bool:
        return False

    def shutdown(self) -> None:
        """Destroys the group for good. Collective over: the group, on NCCL. Idempotent, also after a release."""
        for live in self.close():
            live.shutdown()

    def abort(self) -> None:
        """Ends the group for good, without the others. Idempotent, also after a release."""
        for live in self.close():
            live.abort()

    def close(self) -> list[Any]:
        """Closes the group for good and returns its backends, for the caller to end. Idempotent."""
        self._state = GroupState.CLOSED
        return [live for channel in self.channels.values() if (live := channel.detach()) is not None]


def _forwarder(op: str) -> Callable[..., Any]:
    def forward(self: ReleasableGroup, *args: Any, **kwargs: Any) -> Any:
        return self._forward(op, args, kwargs)

    return _left_to_eager(forward)


def _refusal(op: str) -> Callable[..., Any]:
    def refuse(self: ReleasableGroup, *args: Any, **kwargs: Any) -> Any:
        raise CommunicatorError(
            f"{op} on group {self.label}: a group that can be released does not have it; "
            "use a plain one, made with the backend of its device"
        )

    return _left_to_eager(refuse)


def _left_to_eager(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes Dynamo break the graph at a method, as at a method of a plain group. Else Dynamo would trace into it."""
    left: Callable[..., Any] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
    return left


def _complete_methods() -> None:
    """Adds each method of torch's groups to the class. A method is forwarded, or raises an error with its name.

    Without this, torch's own class would handle the call, but the group has no backend there.
    """
    for name in dir(dist.ProcessGroup):
        if name.startswith("__") or name in vars(ReleasableGroup) or name in _KEPT_FROM_TORCH:
            continue
        if callable(getattr(dist.ProcessGroup, name)):
            setattr(ReleasableGroup, name, _forwarder(name) if name in FORWARDED else _refusal(name))


_complete_methods()


def backend_name(backend: str) -> str:
    """Returns torch's name of the releasable variant of a backend."""
    return f"rl_safe_{backend}"


def register_backend(backend: str) -> str:
    """Makes a releasable backend known to ``torch.distributed`` in this process. Idempotent, not collective.

    Args:
        backend: ``"gloo"`` for trainers on CPUs, ``"nccl"`` for those on GPUs.

    Returns:
        The name of the releasable backend, for ``init_process_group`` or ``new_group``.

    Raises:
        CommunicatorError: If ``backend`` has no releasable variant.
    """
    if backend not in ("gloo", "nccl"):
        raise CommunicatorError(f"backend {backend}: only gloo and nccl groups can be released")
    name = backend_name(backend)
    if name not in dist.Backend.backend_list:
        devices = ["cpu"] if backend == "gloo" else ["cpu", "cuda"]
        dist.Backend.register_backend(
            name,
            lambda base, options: ReleasableGroup(backend, base, options),
            extended_api=True,
            devices=devices,
        )
    _install_batching()
    return name


def _install_batching() -> None:
    """Replaces ``batch_isend_irecv`` once in each process, so that it batches on releasable groups too.

    torch's function batches only if the type of the group is ProcessGroup itself. Otherwise it issues the operations
    one by one. On NCCL, two neighbours that both send first then deadlock, and each pair makes a new connection.
    """
    original = c10d.batch_isend_irecv
    if hasattr(original, "batches_releasable_groups"):
        return

    @wraps(original)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        group = p2p_op_list[0].group if p2p_op_list else None
        if not isinstance(group, ReleasableGroup):
            return original(p2p_op_list)
        return _batch(group, p2p_op_list)

    batch_isend_irecv.batches_releasable_groups = True  # type: ignore[attr-defined]
    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv


def _batch(group: ReleasableGroup, ops: list[Any]) -> list[Any]:
    """Batches operations as torch's own function does, without a check of the group's type."""
    c10d._check_p2p_op_list(ops)
    device = ops[0].tensor.device
    live = group._channel_for("batch_isend_irecv", device.type)
    group._inner_for("batch_isend_irecv", live)

    def issue(op: Any) -> Any:
        peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
        return op.op(op.tensor, group=op.group, tag=op.tag, **peer)

    if not live.live().supports_coalescing:
        return [work for work in map(issue, ops) if work]
    with c10d._coalescing_manager(group, device, async_ops=True) as manager:
        for op in ops:
            issue(op)
    return list(manager.works)
