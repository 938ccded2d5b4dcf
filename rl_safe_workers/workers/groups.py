"""The groups mixin: the training world and Megatron's groups in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from rl_safe_workers.comms.groups import init_megatron_groups, world_options
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import TRAINING_WORLD, ControlPlane
from rl_safe_workers.errors import CommunicatorError, Failure
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.platforms import cuda
from rl_safe_workers.platforms.device_memory import free_bytes
from rl_safe_workers.ranks import trainer_id, trainer_ids
from rl_safe_workers.topology.comms_plan import CommsPlan
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.workers.base import SafeWorker
from rl_safe_workers.worlds.address import StoreAddress
from rl_safe_workers.worlds.door import Door
from rl_safe_workers.worlds.store import connect_store, serve_store
from rl_safe_workers.worlds.training_world import carve_training_world, init_training_world


class GroupsMixin(SafeWorker):
    """Brings a worker into the training world and creates Megatron's groups there."""

    _door: Door | None = None
    """Of the store, on the rank that serves it."""

    def plan_comms(self) -> CommsPlan:
        """Returns what the communicators will be, from the configuration alone. Not collective.

        Raises:
            ConfigError: If ``rl_safe.bootstrap.max_ctas`` limits a group that there is not, or to no number of CTAs.
        """
        layout = ParallelLayout.of(self.megatron, world_size=self.training_size)
        features = self.features or Features.of(self.megatron)
        settings = self.rl_safe.bootstrap
        return CommsPlan.of(layout, features, settings.max_ctas.limits(), budget=settings.budget)

    def serve_store(self, host: str) -> StoreAddress:
        """Starts the run's store in this process, which must then be the last of the trainers to end."""
        self.store, address, self._door = serve_store(host, timeout=self.timeout(Phase.WORLD))
        return address

    def init_world(self, address: StoreAddress, *, backend: str) -> None:
        """Creates the training world as the default group: isolated mode. Collective over: all trainers.

        Args:
            address: Where the store of `serve_store` listens.
            backend: ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
        """
        with self.lifecycle.enter(Phase.WORLD):
            if not hasattr(self, "store"):
                self.store = connect_store(address, timeout=self.timeout(Phase.WORLD))
            self._open_control(address.secret)
            self.control.barrier(Phase.WORLD, Deadline.after(self.timeout(Phase.WORLD)))
            self.world = init_training_world(
                self.store,
                training_rank=self.training_rank,
                size=self.training_size,
                backend=backend,
                timeout=self.timeout(Phase.WORLD),
                options=self._world_options(),
            )

    def carve_world(self, address: StoreAddress, *, training_joint_ranks: Sequence[int]) -> None:
        """Makes the trainers' subgroup of the host's default group the default one: carved mode.

        Collective over: the training ranks; rollout ranks are never waited for.

        Args:
            address: A store that every trainer reaches, such as the one under the host's default group, and a secret
                that every trainer was given.
            training_joint_ranks: Ranks of the trainers in the host's default group, ascending.

        Raises:
            CommunicatorError: As `carve_training_world`, or if this worker was set up as another training rank.
        """
        with self.lifecycle.enter(Phase.WORLD):
            if not hasattr(self, "store"):
                self.store = connect_store(address, timeout=self.timeout(Phase.WORLD))
            self._open_control(address.secret)
            self.control.barrier(Phase.WORLD, Deadline.after(self.timeout(Phase.WORLD)))
            self.world = carve_training_world(
                training_joint_ranks, timeout=self.timeout(Phase.WORLD), options=self._world_options()
            )
            place, expected = (self.world.training_rank, self.world.size), (self.training_rank, self.training_size)
            if place != expected:
                raise CommunicatorError(
                    f"this process is training rank {place[0]} of {place[1]} in {list(training_joint_ranks)}, but was "
                    f"set up as training rank {expected[0]} of {expected[1]}: give setup_worker the former"
                )

    def _world_options(self) -> Any:
        return world_options(self.plan_comms().limits) if self._has_nccl else None

    def _check_memory(self, plan: CommsPlan) -> None:
        """Refuses the groups on every rank if one has no room for them."""
        failure = None
        try:
            plan.check_fits(free_bytes=free_bytes(self.device), gpus_per_node=cuda.gpus_of_this_node())
        except CommunicatorError as error:
            failure = Failure.of(error)
        for rank, (text, foreign) in self.failed_ranks(Phase.GROUPS, failure).items():
            raise CommunicatorError(f"training rank {rank}: {text}", culprit=trainer_id(rank), foreign=foreign)

    @property
    def _has_nccl(self) -> bool:
        return self.device.type == "cuda"

    def _open_control(self, secret: bytes) -> None:
        self.control = ControlPlane(
            self.store,
            world=TRAINING_WORLD,
            rank=self.training_rank,
            members=trainer_ids(range(self.training_size)),
            secret=secret,
        )

    def init_groups(self, *, seed: int) -> None:
        """Creates Megatron's groups and seeds its RNG tracker. Collective over: the training world.

        Raises:
            ConfigError: As `plan_comms`, before any group is made.
            CommunicatorError: Before any is made, if the backend lacks what a group will carry, or the device has less
                memory free than the groups will take.
        """
        plan = self.plan_comms()
        plan.check_backend(dist.get_backend_config())
        with self.phase(Phase.GROUPS):
            if self._has_nccl:
                self._check_memory(plan)
            init_megatron_groups(
                self.megatron,
                seed=seed,
                timeout=self.timeout(Phase.GROUPS),
                limits=plan.limits if self._has_nccl else None,
            )
            # A rebuilt set of groups needs its own bootstrap.
            self.lifecycle.invalidate(Phase.BOOTSTRAP)
