"""Brings a trainer into the training world: makes the world, carves it out of a host's world, or takes the host's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore

from rl_safe_workers.compat import torch_groups
from rl_safe_workers.control.connection import own_connection
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.shared_secret import SharedSecret
from rl_safe_workers.errors import CommunicatorError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.door import Door
from rl_safe_workers.worlds.store import connect_store, serve_store
from rl_safe_workers.worlds.training_rank import Part, TrainingRank
from rl_safe_workers.worlds.training_world import TrainingWorld, carve_training_world, init_training_world


class WorldEntry(Part):
    """Brings a rank into the training world.

    Attributes:
        door: The store's door, on the rank that serves the store; else None.
        job_key: A secret key, the same on every rank of a host's world and unique to the job; empty before
            `adopt_world`.
    """

    def __init__(self, rank: TrainingRank, *, world_options: Callable[[], Any]) -> None:
        """Joins no world yet.

        Args:
            rank: This rank.
            world_options: Returns the backend's options for the default group; None for the backend's defaults.
        """
        super().__init__(rank)
        self._world_options = world_options
        self.door: Door | None = None
        self.job_key = ""

    def serve_store(self, host: str) -> StoreAddress:
        """Starts the run's store in this process, and returns its address with a new secret. Not collective.

        The store ends with this process, so this process must be the last of the trainers to end.

        Args:
            host: Address to listen on.
        """
        self.rank.store, address, self.door = serve_store(host, timeout=self.rank.timeout(Phase.WORLD))
        return address

    def init_world(self, address: StoreAddress, *, backend: str) -> None:
        """Creates the training world as the default group: isolated mode. Collective over: all trainers.

        Args:
            address: Address of the store that `serve_store` started.
            backend: ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.

        Raises:
            PhaseTimeoutError: If a trainer does not come within the timeout of phase ``world``; names it.
            CommunicatorError: If no store can be reached at the address, or this process already has a default group.
        """
        with self.rank.lifecycle.enter(Phase.WORLD):
            self._meet_at(address)
            self.rank.world = init_training_world(
                self.rank.store,
                training_rank=self.rank.training_rank,
                size=self.rank.training_size,
                backend=backend,
                timeout=self.rank.timeout(Phase.WORLD),
                options=self._world_options(),
            )

    def carve_world(self, address: StoreAddress, *, training_joint_ranks: Sequence[int]) -> None:
        """Makes the trainers' subgroup of the host's default group the default one: carved mode.

        Collective over: the training ranks. It never waits for rollout ranks.

        Args:
            address: A store that every trainer reaches, such as the one under the host's default group, and a secret
                that every trainer was given.
            training_joint_ranks: Ranks of the trainers in the host's default group, ascending.

        Raises:
            PhaseTimeoutError: If a trainer does not come within the timeout of phase ``world``; names it.
            CommunicatorError: As `carve_training_world`. Also if no store can be reached at the address, or this worker
                was set up as another training rank.
        """
        with self.rank.lifecycle.enter(Phase.WORLD):
            self._meet_at(address)
            world = carve_training_world(
                training_joint_ranks, timeout=self.rank.timeout(Phase.WORLD), options=self._world_options()
            )
            self.rank.world = world
            place = (world.training_rank, world.size)
            expected = (self.rank.training_rank, self.rank.training_size)
            if place != expected:
                raise CommunicatorError(
                    f"this process is training rank {place[0]} of {place[1]} in {list(training_joint_ranks)}, but was "
                    f"set up as training rank {expected[0]} of {expected[1]}: call setup_worker with training_rank="
                    f"{place[0]}, training_size={place[1]}"
                )

    def _meet_at(self, address: StoreAddress) -> None:
        if not self.rank.has_store:
            self.rank.store = connect_store(address, timeout=self.rank.timeout(Phase.WORLD))
        self.rank.open_control(address.secret)
        self.rank.control.barrier(Phase.WORLD, Deadline.after(self.rank.timeout(Phase.WORLD)))

    def adopt_world(self) -> None:
        """Takes the host's default group, which must contain only trainers, as the training world.

        Collective over: the default group, through its store. The ranks agree on the secret that signs the control
        plane's messages; see `control.shared_secret`.

        Raises:
            PhaseTimeoutError: If a rank does not come within the timeout of phase ``world``; names it.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        with self.rank.lifecycle.enter(Phase.WORLD):
            # Use a connection of its own: NCCL waits in the group's connection for peers, and blocks it for all others.
            connection = own_connection(torch_groups.default_store())
            self.rank.store = PrefixStore("rl_safe", connection)
            self.rank.world = TrainingWorld(training_rank=rank, size=size, joint_ranks=tuple(range(size)))
            deadline = Deadline.after(self.rank.timeout(Phase.WORLD))
            shared = SharedSecret(self.rank.store, rank=rank, size=size, phase=Phase.WORLD, deadline=deadline)
            self.rank.open_control(shared.secret)
            self.job_key = hashlib.sha256(b"job" + shared.secret).hexdigest()[:16]
            self.rank.control.barrier(Phase.WORLD, deadline)
            shared.withdraw()
