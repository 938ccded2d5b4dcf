"""On which node each rank goes, so that groups that talk much stay inside one.

Pure Python: the driver places a run by it, and a plan predicts with it what the driver will do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_safe_workers.topology.layout import ParallelLayout

if TYPE_CHECKING:
    from rl_safe_workers.config import ClusterConfig

Resources = Mapping[str, float]
"""Amounts by Ray's name of a resource: ``{"CPU": 2.0, "GPU": 8.0}``."""

GRAIN = 10_000
"""Ray counts resources in ten-thousandths."""
MOST_STEPS = 60_000
"""Ranks times nodes up to which the best cut is searched for, half a second; above it nodes are filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where every rank is. Training ranks rise with the nodes, which keeps neighbours together.

    Example: ``place(layout, [{"GPU": 8.0}] * 4, trainer={"GPU": 1.0}, rollout={"GPU": 1.0}, rollouts=8)``
    """

    trainers: tuple[int, ...]
    """Place of the node of each training rank, in the order that the nodes were given in."""
    rollouts: tuple[int, ...]
    """The same of each rollout rank."""

    @property
    def nodes(self) -> list[int]:
        """Places of all nodes that have a rank, rising."""
        return sorted({*self.trainers, *self.rollouts})


class DoesNotFitError(Exception):
    """The nodes have too little room; says how many of each role they would take.

    Attributes:
        trainers: Training ranks that fit.
        rollouts: Rollout ranks that fit beside them.
    """

    def __init__(self, *, trainers: int, rollouts: int) -> None:
        self.trainers, self.rollouts = trainers, rollouts
        super().__init__(f"room for {trainers} trainers and {rollouts} rollout ranks")


def needs(cluster: ClusterConfig) -> tuple[Resources, Resources]:
    """Returns the resources of a trainer and of a rollout rank; colocated, those of a pair, and nothing."""
    gpu = {} if cluster.device == "cpu" else {"GPU": 1.0}
    if cluster.colocated:
        return {"CPU": cluster.cpus_per_trainer + cluster.cpus_per_rollout, **gpu}, {}
    return {"CPU": cluster.cpus_per_trainer, **gpu}, {"CPU": cluster.cpus_per_rollout, **gpu}


def rollouts_apart(cluster: ClusterConfig) -> int:
    """How many rollout ranks need a place of their own: all, or none where each shares its trainer's."""
    return 0 if cluster.colocated else cluster.num_rollouts


def place_run(cluster: ClusterConfig, layout: ParallelLayout, nodes: Sequence[Resources]) -> Placement:
    """Places all ranks of a run; colocated, rollout ranks are where their trainers are, and not listed.

    Args:
        cluster: How many there are, and what each takes.
        layout: As for `place`.
        nodes: As for `place`.

    Raises:
        DoesNotFitError: If there is no room.
    """
    trainer, rollout = needs(cluster)
    return place(layout, nodes, trainer=trainer, rollout=rollout, rollouts=rollouts_apart(cluster))


def place(
    layout: ParallelLayout, nodes: Sequence[Resources], *, trainer: Resources, rollout: Resources, rollouts: int
) -> Placement:
    """Places trainers on as few nodes as keep the most groups whole, and rollout ranks apart from them if they can be.

    Tensor-, expert-tensor- and expert-parallel groups that fit into a node are not cut, where there is a way; the more
    nodes that takes, the later it is chosen.

    Args:
        layout: The training world's.
        nodes: What each node has free, in the order that ranks are to follow.
        trainer: What a trainer takes.
        rollout: What a rollout rank takes.
        rollouts: Number of rollout ranks.

    Raises:
        DoesNotFitError: If there is no room.

    >>> layout = ParallelLayout(world_size=8, tensor=4, pipeline=1, expert=1, expert_tensor=4, context=1)
    >>> gpu = {"GPU": 1.0}
    >>> place(layout, [{"GPU": 6.0}] * 2, trainer=gpu, rollout=gpu, rollouts=2)
    Placement(trainers=(0, 0, 0, 0, 1, 1, 1, 1), rollouts=(0, 0))
    """
    rooms = [room(node, trainer) for node in nodes]
    counts = _share_out(layout, rooms)
    beside = [room(_less(node, trainer, count), rollout) for node, count in zip(nodes, counts, strict=True)]
    if sum(counts) == layout.world_size and sum(beside) >= rollouts:
        apart = sorted(range(len(nodes)), key=lambda i: counts[i] > 0)
        return Placement(trainers=_places(counts), rollouts=_places(_fill(beside, apart, rollouts)))
    # Trainers and rollout ranks take different amounts: what was left beside trainers may have been too little of each.
    last_first = range(len(nodes) - 1, -1, -1)
    generating = _fill([room(node, rollout) for node in nodes], last_first, rollouts)
    left = [room(_less(node, rollout, count), trainer) for node, count in zip(nodes, generating, strict=True)]
    moved = _share_out(layout, left)
    if sum(moved) == layout.world_size and sum(generating) == rollouts:
        return Placement(trainers=_places(moved), rollouts=_places(generating))
    # Or of the one where the other has taken all: fewer trainers on each node leave room beside them.
    for most in range(max(rooms, default=0), 0, -1):
        spread = _share_out(layout, [min(fitting, most) for fitting in rooms])
        left = [room(_less(node, trainer, count), rollout) for node, count in zip(nodes, spread, strict=True)]
        if sum(spread) == layout.world_size and sum(left) >= rollouts:
            return Placement(trainers=_places(spread), rollouts=_places(_fill(left, range(len(nodes)), rollouts)))
    raise DoesNotFitError(trainers=sum(counts), rollouts=min(rollouts, sum(beside)))


def room(free: Resources, needed: Resources) -> int:
    """How many times the needed amounts are there; one that needs nothing fits nowhere.

    >>> room({"CPU": 2.0, "GPU": 3.0}, {"CPU": 0.25, "GPU": 1.0})
    3
    """
    times = [round(free.get(name, 0.0) * GRAIN) // round(amount * GRAIN) for name, amount in needed.items() if amount]
    return max(0, min(times, default=0))


def cut_groups(layout: ParallelLayout, boundary: int, *, largest: int) -> int:
    """Groups with ranks on both sides of a boundary, of those that a node of the largest size could hold.

    Args:
        layout: The training world's.
        boundary: The first rank after it.
        largest: Ranks that the roomiest node holds.
    """
    cut = sum(1 for size in (layout.tensor, layout.expert_tensor) if size <= largest and boundary % size)
    block = layout.expert_tensor * layout.expert
    if layout.expert > 1 and block <= largest and (offset := boundary % block):
        last = block - layout.expert_tensor  # how far the last member of a group is from the first
        cut += sum(1 for first in range(min(layout.expert_tensor, offset)) if first + last >= offset)
    return cut


def _share_out(layout: ParallelLayout, rooms: Sequence[int]) -> list[int]:
    """Returns the training ranks of each node; fewer than all if there is no room."""
    world = layout.world_size
    if sum(rooms) < world:
        return _fill(rooms, range(len(rooms)), world)
    largest = max(rooms)
    spans = [layout.tensor, layout.expert_tensor, layout.expert_tensor * layout.expert]
    unit = math.lcm(*(span for span in spans if span <= largest))
    whole = [fitting // unit * unit for fitting in rooms]
    if sum(whole) >= world:
        return _fill(whole, _fewest(whole, world), world)
    if world * len(rooms) <= MOST_STEPS:
        return _least_cut(layout, rooms, largest)
    return _fill(rooms, _fewest(rooms, world), world)


def _fewest(rooms: Sequence[int], needed: int) -> list[int]:
    """Returns the least number of nodes that have the room, in their order."""
    chosen: list[int] = []
    for node in sorted(range(len(rooms)), key=lambda i: -rooms[i]):
        if needed <= 0:
            break
        chosen.append(node)
        needed -= rooms[node]
    return sorted(chosen)


def _least_cut(layout: ParallelLayout, rooms: Sequence[int], largest: int) -> list[int]:
    """Returns the training ranks of each node such that the fewest groups are cut, then on the fewest nodes."""
    world = layout.world_size
    cuts = [cut_groups(layout, boundary, largest=largest) for boundary in range(world)] + [0]
    # For each node, and each number of ranks placed up to it: groups cut, nodes taken, and how many the node has taken.
    layers: list[dict[int, tuple[int, int, int]]] = [{0: (0, 0, 0)}]
    for fitting in rooms:
        found: dict[int, tuple[int, int, int]] = {}
        for placed, (cut, taken, _) in layers[-1].items():
            for count in range(min(fitting, world - placed) + 1):
                after = placed + count
                way = (cut + (cuts[after] if count else 0), taken + bool(count), count)
                # Of equals the one that leaves the least to this node, so that the first ones are filled.
                if after not in found or way < found[after]:
                    found[after] = way
        layers.append(found)
    counts = []
    for layer in reversed(layers[1:]):
        counts.append(layer[world][2])
        world -= counts[-1]
    return counts[::-1]


def _fill(rooms: Sequence[int], order: Sequence[int], needed: int) -> list[int]:
    """Returns how many go on each node, if nodes are filled in this order until all have a place, or all are full."""
    counts = [0] * len(rooms)
    for node in order:
        counts[node] = min(rooms[node], needed)
        needed -= counts[node]
    return counts


def _places(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(node for node, count in enumerate(counts) for _ in range(count))


def _less(free: Resources, needed: Resources, times: int) -> dict[str, float]:
    return {name: amount - times * needed.get(name, 0.0) for name, amount in free.items()}
