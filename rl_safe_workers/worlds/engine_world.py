"""The world of one vLLM engine: the default process group of the rollout ranks that share it, and of no other rank.

vLLM makes its own groups out of the default group. So the default group of a rollout rank contains no trainer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore

from rl_safe_workers.control.connection import own_connection
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.door import Door
from rl_safe_workers.worlds.store import connect_store, serve_store


class EngineWorld:
    """A rollout rank's place in the world of its engine."""

    def __init__(self, rollout_rank: int, *, size: int) -> None:
        """Joins no world yet.

        Args:
            rollout_rank: This rank. Consecutive ranks share an engine.
            size: Number of ranks of an engine: its tensor-parallel size.
        """
        self.engine, self.rank = divmod(rollout_rank, size)
        self.size = size
        self._door: Door | None = None
        self._store: dist.TCPStore | None = None

    @staticmethod
    def name(address: StoreAddress) -> str:
        """Returns a name that no other engine on this machine ever has. The name does not reveal the secret."""
        return f"rl_safe_{hashlib.sha256(b'engine' + address.secret).hexdigest()[:16]}"

    @property
    def members(self) -> tuple[RankId, ...]:
        """The ranks of the engine, by their rank in it."""
        return tuple(RankId(Role.ROLLOUT, self.engine * self.size + rank) for rank in range(self.size))

    def serve_store(self, host: str, *, timeout: timedelta) -> StoreAddress | None:
        """Starts the engine's store on its first rank. Returns its address; None on the other ranks.

        Args:
            host: Address to listen on.
            timeout: How long ``get`` and ``wait`` block by default.
        """
        if self.rank:
            return None
        self._store, address, self._door = serve_store(host, timeout=timeout)
        return address

    @contextmanager
    def entered(self, address: StoreAddress, *, timeout: timedelta) -> Iterator[None]:
        """Makes the world, and lets the body build the engine in it. Collective over: the ranks of the engine.

        After the body, a store on the loopback interface accepts no new connection.

        Args:
            address: Address of the engine's store.
            timeout: Longest wait for the others, and of one collective of the default group.

        Raises:
            PhaseTimeoutError: If some rank does not come in time; names it.
            CommunicatorError: If there is no store at the address, or another user of this machine has connected to it.
        """
        store = self._store or connect_store(address, timeout=timeout)
        control = ControlPlane(
            store, world=f"engine {self.engine}", rank=self.rank, members=self.members, secret=address.secret
        )
        control.barrier(Phase.START, Deadline.after(timeout))
        own: dist.Store = own_connection(store)
        dist.init_process_group(
            "gloo", store=PrefixStore("engine", own), rank=self.rank, world_size=self.size, timeout=timeout
        )
        yield
        control.barrier(Phase.START, Deadline.after(timeout))
        if self._door is not None:
            self._door.shut()
