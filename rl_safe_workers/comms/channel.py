"""One device type of a releasable group: the inner group of the present generation, and what outlives it."""

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
    """Connects to all members, within ``timeout``: gloo does so at once. Collective over: the group."""
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
    """One device type of one group: the inner group of the present generation, and what outlives it.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        backend: ``"gloo"`` or ``"nccl"``.
        kept: Whether it stays as it is when the group is released.
        timeout: Longest wait of one collective, in this generation and later ones.
        options: torch's options of the backend; every generation is made with this one object.
        pending: Works that their callers still hold.
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
        """Makes the inner group. Collective over: the group, on gloo.

        Args:
            store: Where the members meet; keys of no other generation may be in it.
            rank: This process's rank in the group.
            size: Number of members.
            name: torch's name of the group.
            members: Ranks of the members in the default group.
            bound: Longest wait for the others; the timeout of collectives comes into force after it.
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
            # Later generations share its device: the thread of one takes 10 ms to end.
            self.options = live.options
        live._set_sequence_number_for_group()
        inner: Any = dist.ProcessGroup(store, rank, size)  # the stubs leave much of it out
        inner._set_default_backend(backend_type)
        inner._register_backend(device, backend_type, live)
        inner._set_group_name(name)
        # Who is passed the inner group, as a trace is, may ask for its members.
        torch_groups.set_members(inner, members)
        self._live, self.inner = live, inner
        self.limit(self.timeout)

    def live(self) -> Any:
        """Returns torch's backend of this generation, or None."""
        return self._live

    def limit(self, timeout: timedelta) -> None:
        """Bounds later collectives of this generation, and of no other."""
        if self._live is not None:
            self._live._set_default_timeout(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Bounds later collectives, those of later generations too."""
        self.timeout = timeout
        self.limit(timeout)

    def detach(self) -> Any:
        """Parts with the inner group; returns its backend, whose communicators its caller ends, or None."""
        torch_groups.forget_members(self.inner)
        live, self._live, self.inner = self._live, None, None
        self.pending.clear()
        return live


class _BackendView:
    """The answer of `_get_backend`: the backend of the present generation.

    ``c10d._set_pg_timeout`` and others ask a group for its backend and look at its class. A real one would reach the
    present generation alone, and after a release there is none; this one stands for all of them.
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

    # torch puts these around the aborts of all groups, released ones or not.
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
