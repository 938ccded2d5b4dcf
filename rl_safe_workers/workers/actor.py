"""The mixin that makes a Megatron actor safe beside vLLM. It gives the actor the methods of a `SafeTrainer`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from rl_safe_workers.checkpoint.load.loader import CheckpointLoads
from rl_safe_workers.checkpoint.save.saver import CheckpointSaves
from rl_safe_workers.config import MegatronConfig, RlSafeConfig
from rl_safe_workers.errors import LifecycleError
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.workers.communicators import Communicators
from rl_safe_workers.workers.conversions import Conversions
from rl_safe_workers.workers.offloader import Offloader
from rl_safe_workers.workers.safe_trainer import SafeTrainer
from rl_safe_workers.workers.weight_sync import WeightSync
from rl_safe_workers.workers.world_entry import WorldEntry
from rl_safe_workers.worlds.training_rank import TrainingRank

P = ParamSpec("P")
T = TypeVar("T")


def _delegate(
    part: Callable[[SafeTrainer], object], method: Callable[Concatenate[Any, P], T]
) -> Callable[Concatenate[MegatronActorMixin, P], T]:
    """Makes a method of the actor from a part's method, with the same arguments and docstring."""

    @functools.wraps(method)
    def call(self: MegatronActorMixin, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(part(self.safe), *args, **kwargs)

    return cast("Callable[Concatenate[MegatronActorMixin, P], T]", call)


class _NotSetUp:
    """Stands in for an actor's `SafeTrainer` until ``setup_worker`` has made it."""

    def __get__(self, actor: object, owner: type) -> Any:
        if actor is None:
            return self
        raise LifecycleError(f"{owner.__name__} has not been set up: call setup_worker() before anything else")


class MegatronActorMixin:
    """Mixin for a class that has ``chunks``, ``optimizer`` and ``export_hf_weights`` (see `MegatronHost`).

    Conversions also need ``load_hf_weights`` (see `ConvertHost`). The mixin keeps one attribute on the actor:
    ``safe``.

    The order of calls::

        setup_worker → init_world or carve_world → init_groups → bootstrap
            → (the host builds its model) → join → offload, onload, send_weights, save_checkpoint … → teardown

    Attributes:
        safe: The `SafeTrainer` with its parts; `setup_worker` makes it.
    """

    safe: SafeTrainer = _NotSetUp()  # type: ignore[assignment]

    def setup_worker(
        self,
        *,
        training_rank: int,
        training_size: int,
        rl_safe: RlSafeConfig,
        megatron: MegatronConfig,
        device: torch.device,
        features: Features | None = None,
        releases_comms: bool = False,
    ) -> None:
        """Stores this actor's place and settings. Touches no device and no network.

        Args:
            training_rank: This process's rank in the training world.
            training_size: Number of trainers.
            rl_safe: Our settings.
            megatron: The parallel sizes and offload settings.
            device: Device of the tensors.
            features: Features that decide which collectives the groups carry; None to take them from ``megatron``.
            releases_comms: Whether an offload also frees the communicators' memory.
        """
        self.safe = SafeTrainer(
            training_rank=training_rank,
            training_size=training_size,
            rl_safe=rl_safe,
            megatron=megatron,
            device=device,
            host=self,
            features=features,
            releases_comms=releases_comms,
        )

    serve_store = _delegate(lambda safe: safe.entry, WorldEntry.serve_store)
    init_world = _delegate(lambda safe: safe.entry, WorldEntry.init_world)
    carve_world = _delegate(lambda safe: safe.entry, WorldEntry.carve_world)
    plan_comms = _delegate(lambda safe: safe.comms, Communicators.plan)
    init_groups = _delegate(lambda safe: safe.comms, Communicators.init_groups)
    bootstrap = _delegate(lambda safe: safe.comms, Communicators.bootstrap)
    late_allocations = _delegate(lambda safe: safe.comms, Communicators.late_allocations)
    phase = _delegate(lambda safe: safe, TrainingRank.phase)
    join = _delegate(lambda safe: safe.weights, WeightSync.join)
    leave = _delegate(lambda safe: safe.weights, WeightSync.leave)
    weight_specs = _delegate(lambda safe: safe.weights, WeightSync.weight_specs)
    send_weights = _delegate(lambda safe: safe.weights, WeightSync.send_weights)
    offload = _delegate(lambda safe: safe.offloader, Offloader.offload)
    onload = _delegate(lambda safe: safe.offloader, Offloader.onload)
    save_checkpoint = _delegate(lambda safe: safe.saves, CheckpointSaves.save_checkpoint)
    poll_checkpoint = _delegate(lambda safe: safe.saves, CheckpointSaves.poll_checkpoint)
    finalize_checkpoint = _delegate(lambda safe: safe.saves, CheckpointSaves.finalize_checkpoint)
    load_checkpoint = _delegate(lambda safe: safe.loads, CheckpointLoads.load_checkpoint)
    load_model_weights = _delegate(lambda safe: safe.loads, CheckpointLoads.load_model_weights)
    convert_checkpoint = _delegate(lambda safe: safe.conversions, Conversions.convert_checkpoint)
    export_hf = _delegate(lambda safe: safe.conversions, Conversions.export_hf)
    teardown = _delegate(lambda safe: safe, SafeTrainer.teardown)
