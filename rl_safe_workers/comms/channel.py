"""One device type of a releasable group: the inner group of the current generation, and the state that outlives it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import Store

from rl_safe_workers.compat import torch_groups
from rl_safe_workers.errors import CommunicatorError


def _connect_gloo(store: Store, rank: int, size: int, timeout: timedelta, options: Any) -> Any:
    """Makes the backend, which connects to all members at once, within ``timeout``. Collective over: the group."""
    if options is None:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    options._timeout = timeout
    options._devices = options._devices or [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _connect_nccl(store: Store, rank: int, size: int, timeout: timedelta, options: Any) -> Any:
    """Makes the backend; NCCL itself connects at the first collective."""
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


class Channel:
    """One device type of one group: the inner group of the current generation, and the state that outlives it.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        backend: ``"gloo"`` or ``"nccl"``.
        kept: Whether it stays connected when the group is released.
        timeout: Longest wait of one collective, in this generation and later ones.
        options: torch's options of the backend. Every generation uses this one object.
        pending: Works to which callers still hold references.
    """

    def __init__(self, device: str, backend: str, *, kept: bool, timeout: timedelta, options: Any) -> None:
        self.device, self.backend, self.kept = device, backend, kept
        self.timeout, self.options = timeout, options
        self.pending: WeakSet[Any] = WeakSet()
        self.inner: Any = None
        self._live: Any = None
        self.view = _BackendView(self)

    def connect(
        self, store: Store, rank: int, size: int, *, name: str, members: Sequence[int], bound: timedelta
    ) -> None:
        """Makes the inner group. Collective over: the group, with gloo. Not collective with NCCL, which connects later.

        Args:
            store: The store for the rendezvous. It must not have keys of another generation.
            rank: This process's rank in the group.
            size: Number of members.
            name: torch's name of the group.
            members: Ranks of the members in the default group.
            bound: Longest wait for the others. After that, the timeout of collectives applies.
        """
        device = torch.device(self.device)
        backend_type = getattr(dist.ProcessGroup.BackendType, self.backend.upper())
        if self.backend == "nccl":
            self.options = self.options if self.options is not None else _default_nccl_options()
            self.options.global_ranks_in_group, self.options.group_name = list(members), name
        connect = _connect_nccl if self.backend == "nccl" else _connect_gloo
        live = connect(store, rank, size, min(bound, self.timeout), self.options)
        if self.backend == "gloo":
            live.options.global_ranks_in_group, live.options.group_name = list(members), name
            # Later generations reuse the device in these options, because the thread of a device takes 10 ms to end.
            self.options = live.options
        live._set_sequence_number_for_group()
        inner: Any = dist.ProcessGroup(store, rank, size)  # the type stubs lack many of its methods
        inner._set_default_backend(backend_type)
        inner._register_backend(device, backend_type, live)
        inner._set_group_name(name)
        # Code that gets the inner group, such as a trace, may ask for its members.
        torch_groups.set_members(inner, members)
        self._live, self.inner = live, inner
        self.limit(self.timeout)

    def live(self) -> Any:
        """Returns torch's backend of this generation, or None."""
        return self._live

    def limit(self, timeout: timedelta) -> None:
        """Sets the timeout of later collectives, in this generation only."""
        if self._live is not None:
            self._live._set_default_timeout(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later collectives, also in later generations."""
        self.timeout = timeout
        self.limit(timeout)

    def detach(self) -> Any:
        """Drops the inner group and returns its backend, or None. The caller must end the backend's communicators."""
        torch_groups.forget_members(self.inner)
        live, self._live, self.inner = self._live, None, None
        self.pending.clear()
        return live


class _BackendView:
    """Stands for the backend of the current generation, as the result of `_get_backend`.

    ``c10d._set_pg_timeout`` and others ask a group for its backend and look at its class. A real backend belongs to one
    generation only, and after a release there is none. This object serves all generations.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return dist.ProcessGroupNCCL if self._channel.backend == "nccl" else dist.ProcessGroupGloo

    def __getattr__(self, name: str) -> Any:
        live = self._channel.live()
        if live is None:
            raise CommunicatorError(
                f"{name} of a {self._channel.backend} backend: it is released, or its group was destroyed"
            )
        return getattr(live, name)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._channel.set_timeout(timeout)

    set_timeout = _set_default_timeout

    # torch calls these before and after it aborts all groups, released or not.
    def _group_start(self) -> None:
        if (live := self._channel.live()) is not None:
            live._group_start()

    def _group_end(self) -> None:
        if (live := self._channel.live()) is not None:
            live._group_end()


def _default_nccl_options() -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = False
    return options
