"""Predicts each rank's writes in a save, and their time at a stated bandwidth, for every way to shard.

It counts the bytes of the weights in the model's dtype, and of the optimizer's master weights and two moments in fp32.
The time is only that of writing. Planning, which grows with the number of tensors, and collectives add to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rl_safe_workers.plan.fields import SHARDINGS
from rl_safe_workers.plan.model import StageSize
from rl_safe_workers.topology.layout import ParallelLayout

OPTIMIZER_BYTES = 12
"""Bytes of optimizer state for a parameter: a master weight and two moments, 4 bytes each."""
OURS = "rl_safe_workers"
RAISES_SINCE = "0.16"
"""The first version of megatron-core in which fully_sharded_model_space raises."""
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The part of a rank's place that decides how much the rank writes.

    Example: ``Place(stage=0, tensor=0, first=True, saves_part=True, expert_first=True, saves_expert_part=True)``
    """

    stage: int
    tensor: int
    first: bool
    """True if the rank is replica 0 of its dense parameters."""
    saves_part: bool
    """True if the rank is in the first optimizer instance, which saves for all."""
    expert_first: bool
    saves_expert_part: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWay:
    """One way of saving, with the bytes that each rank writes.

    Example: ``SaveWay(sharding="dp_reshardable", fully_parallel=True, bytes_by_rank=(…), seconds=12.0)``
    """

    sharding: str
    fully_parallel: bool
    bytes_by_rank: tuple[int, ...]
    """Bytes that each rank writes; empty if this way raises."""
    seconds: float

    @property
    def total(self) -> int:
        """Bytes of the checkpoint."""
        return sum(self.bytes_by_rank)

    @property
    def most(self) -> int:
        """Bytes that the rank with most bytes writes."""
        return max(self.bytes_by_rank, default=0)

    @property
    def writers(self) -> int:
        """Number of ranks that write anything."""
        return sum(written > 0 for written in self.bytes_by_rank)


@dataclass(frozen=True, slots=True)
class _World:
    layout: ParallelLayout
    stages: Sequence[StageSize]
    instances: int
    weight_bytes: int

    @property
    def copies(self) -> int:
        return self.layout.data * self.layout.context

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that together hold one copy of a stage's experts."""
        return self.layout.expert * self.layout.expert_tensor

    def dense(self, place: Place) -> float:
        """Returns the number of dense parameters on a rank that no other tensor-parallel rank saves."""
        stage = self.stages[place.stage]
        return stage.sharded / self.layout.tensor + (stage.replicated if place.tensor == 0 else 0)

    def experts(self, place: Place) -> float:
        """Returns the number of expert parameters on a rank."""
        return self.stages[place.stage].experts / self.expert_ranks


_Share = Callable[[_World, Place], float]


def _first_replica(world: _World, place: Place) -> float:
    return world.dense(place) * place.first + world.experts(place) * place.expert_first


def _fully_parallel(world: _World, place: Place) -> float:
    # Each data-parallel group divides the shards of which it has replica 0. Experts span several of these groups.
    sharing = len(range(place.tensor, world.expert_ranks, world.layout.tensor))
    return (world.dense(place) + sharing * world.experts(place)) / world.copies


def _own_shard(world: _World, place: Place) -> float:
    stage = world.stages[place.stage]
    part, expert_part = world.copies // world.instances, world.layout.expert_data // world.instances
    dense = (stage.sharded / world.layout.tensor + stage.replicated) / part if place.saves_part else 0
    return dense + (world.experts(place) / expert_part if place.saves_expert_part else 0)


def _data_rank_zero(world: _World, place: Place) -> float:
    stage = world.stages[place.stage]
    dense = (stage.sharded / world.layout.tensor + stage.replicated) * place.first
    return dense + world.experts(place) * place.expert_first


def _evenly(world: _World, place: Place) -> float:
    stage, layout = world.stages[place.stage], world.layout
    dense = (stage.sharded + stage.replicated) / (layout.tensor * world.copies)
    return dense + world.experts(place) / layout.expert_data


_OPTIMIZER: Mapping[str, tuple[_Share, _Share]] = {
    "dp_reshardable": (_own_shard, _own_shard),
    "fully_reshardable": (_first_replica, _fully_parallel),
    "dp_zero_gather_scatter": (_data_rank_zero, _data_rank_zero),
}
"""The share of a rank, by sharding: without the fully-parallel wrapper, and with it."""


def plan_saves(
    layout: ParallelLayout,
    stages: Sequence[StageSize],
    *,
    instances: int,
    weight_bytes: int,
    nodes: Sequence[int],
    node_bytes_s: float,
    raises: bool,
) -> list[SaveWay]:
    """Predicts the writes of every way of saving, ours last.

    Args:
        layout: Sizes of the axes.
        stages: Parameters of each pipeline stage.
        instances: Number of optimizer instances. The first one saves.
        weight_bytes: Bytes of one weight of the model.
        nodes: The node of each training rank. The ranks on a node share its bandwidth.
        node_bytes_s: Bytes that a node writes per second.
        raises: Whether this megatron-core refuses to save fully_sharded_model_space.
    """
    world = _World(layout, stages, instances, weight_bytes)
    places = list(_places(layout, instances))

    def way(sharding: str, fully_parallel: bool, weights: _Share, optimizer: _Share | None) -> SaveWay:
        if optimizer is None:
            return SaveWay(sharding=sharding, fully_parallel=fully_parallel, bytes_by_rank=(), seconds=0.0)
        written = {
            place: round(weight_bytes * weights(world, place) + OPTIMIZER_BYTES * optimizer(world, place))
            for place in dict.fromkeys(places)
        }
        by_rank = tuple(written[place] for place in places)
        by_node: Counter[int] = Counter()
        for rank, count in enumerate(by_rank):
            by_node[nodes[rank]] += count
        seconds = max(by_node.values()) / node_bytes_s
        return SaveWay(sharding=sharding, fully_parallel=fully_parallel, bytes_by_rank=by_rank, seconds=seconds)

    found = []
    for sharding in SHARDINGS:
        shares = _OPTIMIZER.get(sharding) or ((None, None) if raises else (_own_shard, _own_shard))
        found += [way(sharding, False, _first_replica, shares[0]), way(sharding, True, _fully_parallel, shares[1])]
    return [*found, way(OURS, False, _evenly, _evenly)]


def _places(layout: ParallelLayout, instances: int) -> Iterator[Place]:
    """Yields each training rank's place. Ranks that write the same amount have equal places."""
    copies, experts = layout.data * layout.context, layout.expert * layout.expert_tensor
    part, expert_part = copies // instances, layout.expert_data // instances
    stage_size = layout.tensor * copies
    for rank in range(layout.world_size):
        stage, within = divmod(rank, stage_size)
        copy, tensor = divmod(within, layout.tensor)
        expert_copy = within // experts
        yield Place(
            stage=stage,
            tensor=tensor,
            first=copy == 0,
            saves_part=copy < part,
            expert_first=expert_copy == 0,
            saves_expert_part=expert_copy < expert_part,
        )
