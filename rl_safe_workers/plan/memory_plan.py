"""Predicts the device memory of communicators on a GPU, in three ways: connected at first use, all warmed, and ours.

``topology.memory`` models one communicator. Every figure is a range, for the rank with most groups. The likely value
and the upper end count every connection that the settings allow. The lower end leaves out connections that are not
known to be used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.plan.families import GroupFamily
from rl_safe_workers.topology.budget import plan_limits
from rl_safe_workers.topology.groups import KINDS, WORLD, Features, OpClass, connected_classes, sends_over_world
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.topology.memory import KERNEL_BYTES, group_bytes, links_of, over_world_bytes

LAZY, WARMED, OURS = "at first use", "every group warmed", "rl_safe_workers"
WAYS = (LAZY, WARMED, OURS)
_BELOW, _ABOVE = 0.88, 1.05
"""Factors that widen the model's range. Measured totals were up to 4 % above the model. They were up to 12 % below it:
with connections at first use and two optimizer instances, where Megatron left one group unused."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of bytes with a likely value. Example: ``Span(3 * 2**30, 4 * 2**30, 5 * 2**30)``."""

    low: int
    likely: int
    high: int

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.likely + other.likely, self.high + other.high)

    @classmethod
    def between(cls, least: int, most: int) -> Span:
        """Returns the range between the model's lowest and highest value, widened by the model's measured error."""
        return cls(int(least * _BELOW), most, int(most * _ABOVE))


NOTHING = Span(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """Memory of one group on the rank with most groups, for each of `WAYS`.

    Example: ``GroupMemory(description="EXPERT_DATA_PARALLEL_GROUP", first_phase=Phase.TRAIN, by_way={LAZY: …})``
    """

    description: str
    first_phase: Phase | None
    by_way: Mapping[str, Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of all communicators on a GPU.

    Example: ``plan_memory(layout, features, families, …).total(LAZY).high``
    """

    groups: tuple[GroupMemory, ...]

    def total(self, way: str) -> Span:
        """Returns the bytes of all groups and of NCCL's kernels, for one of `WAYS`."""
        return sum((group.by_way[way] for group in self.groups), Span.between(KERNEL_BYTES, KERNEL_BYTES))

    def late(self) -> Span:
        """Returns the bytes that the first training step adds at its peak, if groups are connected at first use."""
        trained = [group.by_way[LAZY] for group in self.groups if group.first_phase is Phase.TRAIN]
        return sum(trained, NOTHING)


def plan_memory(
    layout: ParallelLayout,
    features: Features,
    families: list[GroupFamily],
    *,
    limits: Mapping[str, int],
    budget: bool,
    nodes: Sequence[int] | None,
    limits_world: bool = True,
) -> MemoryPlan:
    """Predicts the memory on the rank with most groups, which is in the first or last pipeline stage.

    Args:
        layout: Sizes of the axes.
        features: The features that decide about the collectives.
        families: The default group and Megatron's groups. gloo groups take no device memory.
        limits: Limit of channels for each group, by Megatron's name, from the configuration.
        budget: Whether our bootstrap limits the groups that carry little.
        nodes: The node of each training rank, if sockets connect the nodes. None for RDMA: then a group on several
            nodes counts like a group inside one node.
        limits_world: Whether our bootstrap limits the default group. It cannot limit a default group that a host makes.
    """
    chosen = plan_limits(layout, features, limits) if budget else dict(limits)
    if not limits_world:
        chosen.pop(KINDS[WORLD].key, None)
    least = replace(
        features,
        batched_p2p=True if features.batched_p2p is None else features.batched_p2p,
        variable_seq_lengths=bool(features.variable_seq_lengths),
        moe=layout.expert > 1 if features.moe is None else features.moe,
    )

    def memory(family: GroupFamily) -> GroupMemory:
        span = _spans(family, layout, most=features, least=least, nodes=nodes)
        limit = chosen.get(family.kind.key) if family.kind else None
        by_way = {
            LAZY: span(None, False) if family.description != WORLD else NOTHING,
            WARMED: span(None, True),
            OURS: span(limit, False),
        }
        if family.description == WORLD and sends_over_world(layout, features):
            sent = {way: over_world_bytes(layout.pipeline, limit if way == OURS else None) for way in WAYS}
            by_way = {way: by_way[way] + Span.between(size, size) for way, size in sent.items()}
            return GroupMemory(description=WORLD, first_phase=Phase.TRAIN, by_way=by_way)
        first = family.kind.first_phase if family.kind and by_way[LAZY].high else None
        return GroupMemory(description=family.description, first_phase=first, by_way=by_way)

    return MemoryPlan(groups=tuple(memory(family) for family in families if family.backend == "nccl"))


def _spans(
    family: GroupFamily, layout: ParallelLayout, *, most: Features, least: Features, nodes: Sequence[int] | None
) -> Callable[[int | None, bool], Span]:
    """Returns a function that predicts a group's bytes. It takes the channel limit, and whether the group is warmed."""
    fewest, largest = (None, None) if nodes is None else family.members_on_a_node(nodes)

    def span(limit: int | None, warmed: bool) -> Span:
        low = _bytes(family, layout, least, limit, warmed=warmed, near=fewest)
        return Span.between(low, _bytes(family, layout, most, limit, warmed=warmed, near=largest))

    return span


def _bytes(
    family: GroupFamily,
    layout: ParallelLayout,
    features: Features,
    limit: int | None,
    *,
    warmed: bool,
    near: int | None,
) -> int:
    kind = family.kind
    carried = connected_classes(kind, family.size, layout, features) if kind else ()
    classes = tuple(dict.fromkeys((OpClass.REDUCE, *carried))) if warmed else carried
    if not classes:
        return 0
    links = links_of(family.description, family.size, features)
    return group_bytes(classes, size=family.size, max_ctas=limit, links=links, near=near)
