"""Places ranks on nodes, so that groups with much traffic stay inside one node.

Pure Python: the driver places a run with it, and a plan uses it to predict the driver's placement.
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
"""Amount of each resource, by Ray's name of the resource: ``{"CPU": 2.0, "GPU": 8.0}``."""

GRAIN = 10_000
"""Ray counts resources in ten-thousandths."""
MOST_STEPS = 60_000
"""Largest product of ranks and nodes for which the best cut is searched, in half a second. Above it, nodes are just
filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The node of every rank. Training ranks are in the order of the nodes, so neighbours stay together.

    Example: ``place(layout, [{"GPU": 8.0}] * 4, trainer={"GPU": 1.0}, rollout={"GPU": 1.0}, rollouts=8)``
    """

    trainers: tuple[int, ...]
    """Index of each training rank's node in the given sequence of nodes."""
    rollouts: tuple[int, ...]
    """Index of each rollout rank's node in the given sequence of nodes."""

    @property
    def nodes(self) -> list[int]:
        """The indices of all nodes that have a rank, ascending."""
        return sorted({*self.trainers, *self.rollouts})


class DoesNotFitError(Exception):
    """The nodes have too little room. The error has the number of ranks of each role that fit.

    Attributes:
        trainers: Training ranks that fit.
        rollouts: Rollout ranks that fit together with these trainers.
    """

    def __init__(self, *, trainers: int, rollouts: int) -> None:
        self.trainers, self.rollouts = trainers, rollouts
        super().__init__(f"room for {trainers} trainers and {rollouts} rollout ranks")


def needs(cluster: ClusterConfig) -> tuple[Resources, Resources]:
    """Returns the resources of a trainer and of a rollout rank.

    If they are colocated, the first has the resources of a pair, and the second is empty.
    """
    gpu = {} if cluster.device == "cpu" else {"GPU": 1.0}
    if cluster.colocated:
        return {"CPU": cluster.cpus_per_trainer + cluster.cpus_per_rollout, **gpu}, {}
    return {"CPU": cluster.cpus_per_trainer, **gpu}, {"CPU": cluster.cpus_per_rollout, **gpu}


def rollouts_apart(cluster: ClusterConfig) -> int:
    """Returns the number of rollout ranks that need their own place: all, or 0 if they share those of trainers."""
    return 0 if cluster.colocated else cluster.num_rollouts


def place_run(cluster: ClusterConfig, layout: ParallelLayout, nodes: Sequence[Resources]) -> Placement:
    """Places all ranks of a run. Colocated rollout ranks are on the nodes of their trainers and are not listed.

    Args:
        cluster: The numbers of ranks, and the resources of each.
        layout: As for `place`.
        nodes: As for `place`.

    Raises:
        DoesNotFitError: If there is not enough room.
    """
    trainer, rollout = needs(cluster)
    return place(layout, nodes, trainer=trainer, rollout=rollout, rollouts=rollouts_apart(cluster))


def place(
    layout: ParallelLayout, nodes: Sequence[Resources], *, trainer: Resources, rollout: Resources, rollouts: int
) -> Placement:
    """Places trainers so that the fewest groups are cut, then on the fewest nodes; rollout ranks on other nodes first.

    Only tensor-, expert-tensor- and expert-parallel groups that fit into a node count. They are not cut if there is a
    way to avoid it.

    Args:
        layout: Layout of the training world.
        nodes: Free resources of each node, in the order that ranks must follow.
        trainer: Resources of a trainer.
        rollout: Resources of a rollout rank.
        rollouts: Number of rollout ranks.

    Raises:
        DoesNotFitError: If there is not enough room.

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
    # Trainers and rollout ranks need different amounts. The rest on each node may have been too small for a rollout
    # rank, so rollout ranks are placed first now.
    last_first = range(len(nodes) - 1, -1, -1)
    generating = _fill([room(node, rollout) for node in nodes], last_first, rollouts)
    left = [room(_less(node, rollout, count), trainer) for node, count in zip(nodes, generating, strict=True)]
    moved = _share_out(layout, left)
    if sum(moved) == layout.world_size and sum(generating) == rollouts:
        return Placement(trainers=_places(moved), rollouts=_places(generating))
    # Trainers may have used up one resource of each node. Fewer trainers on each node leave room for rollout ranks.
    for most in range(max(rooms, default=0), 0, -1):
        spread = _share_out(layout, [min(fitting, most) for fitting in rooms])
        left = [room(_less(node, trainer, count), rollout) for node, count in zip(nodes, spread, strict=True)]
        if sum(spread) == layout.world_size and sum(left) >= rollouts:
            return Placement(trainers=_places(spread), rollouts=_places(_fill(left, range(len(nodes)), rollouts)))
    raise DoesNotFitError(trainers=sum(counts), rollouts=min(rollouts, sum(beside)))


def room(free: Resources, needed: Resources) -> int:
    """Returns how many times the needed amounts fit into the free amounts; 0 if nothing is needed.

    >>> room({"CPU": 2.0, "GPU": 3.0}, {"CPU": 0.25, "GPU": 1.0})
    3
    """
    times = [round(free.get(name, 0.0) * GRAIN) // round(amount * GRAIN) for name, amount in needed.items() if amount]
    return max(0, min(times, default=0))


def cut_groups(layout: ParallelLayout, boundary: int, *, largest: int) -> int:
    """Returns the number of groups with ranks on both sides of a boundary. Groups larger than every node do not count.

    Args:
        layout: Layout of the training world.
        boundary: The first rank after the boundary.
        largest: Number of ranks that fit on the largest node.
    """
    cut = sum(1 for size in (layout.tensor, layout.expert_tensor) if size <= largest and boundary % size)
    block = layout.expert_tensor * layout.expert
    if layout.expert > 1 and block <= largest and (offset := boundary % block):
        last = block - layout.expert_tensor  # distance from the first to the last member of a group
        cut += sum(1 for first in range(min(layout.expert_tensor, offset)) if first + last >= offset)
    return cut


def _share_out(layout: ParallelLayout, rooms: Sequence[int]) -> list[int]:
    """Returns the number of training ranks of each node; fewer than all ranks if there is not enough room."""
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
    """Returns the fewest nodes that have the needed room, in their order."""
    chosen: list[int] = []
    for node in sorted(range(len(rooms)), key=lambda i: -rooms[i]):
        if needed <= 0:
            break
        chosen.append(node)
        needed -= rooms[node]
    return sorted(chosen)


def _least_cut(layout: ParallelLayout, rooms: Sequence[int], largest: int) -> list[int]:
    """Returns the number of training ranks of each node that cuts the fewest groups, then uses the fewest nodes."""
    world = layout.world_size
    cuts = [cut_groups(layout, boundary, largest=largest) for boundary in range(world)] + [0]
    # For each node, and each number of ranks placed so far: groups cut, nodes used, and ranks on this node.
    layers: list[dict[int, tuple[int, int, int]]] = [{0: (0, 0, 0)}]
    for fitting in rooms:
        found: dict[int, tuple[int, int, int]] = {}
        for placed, (cut, taken, _) in layers[-1].items():
            for count in range(min(fitting, world - placed) + 1):
                after = placed + count
                way = (cut + (cuts[after] if count else 0), taken + bool(count), count)
                # Among equals, the one with the fewest ranks on this node wins, so that earlier nodes are filled.
                if after not in found or way < found[after]:
                    found[after] = way
        layers.append(found)
    counts = []
    for layer in reversed(layers[1:]):
        counts.append(layer[world][2])
        world -= counts[-1]
    return counts[::-1]


def _fill(rooms: Sequence[int], order: Sequence[int], needed: int) -> list[int]:
    """Returns the number of ranks on each node if nodes are filled in this order, until all ranks have a place."""
    counts = [0] * len(rooms)
    for node in order:
        counts[node] = min(rooms[node], needed)
        needed -= counts[node]
    return counts


def _places(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(node for node, count in enumerate(counts) for _ in range(count))


def _less(free: Resources, needed: Resources, times: int) -> dict[str, float]:
    return {name: amount - times * needed.get(name, 0.0) for name, amount in free.items()}
