"""Finds the ranks of each communicator that megatron-core builds, without building any.

All groups of one kind are one family. The members of a group lie along some axes of the training world, and there is
one group for each position on the other axes. So a few numbers describe a family in a world of any size. Members are
listed only on request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rl_safe_workers.topology.groups import HOST_KINDS, KINDS, WORLD, GroupKind
from rl_safe_workers.topology.layout import ParallelLayout

RULES = ("0.16", "0.17", "0.18", "0.19", "0.20")
"""Versions of megatron-core whose rules are known."""
_REMAT = "0.19"


@dataclass(frozen=True, slots=True)
class Axis:
    """Positions that are ``stride`` ranks apart. Example: ``Axis(2, 4)``: ranks r and r + 4."""

    size: int
    stride: int


@dataclass(frozen=True, kw_only=True)
class GroupFamily:
    """All groups of one kind.

    Example: ``GroupFamily(description="TENSOR_MODEL_PARALLEL_GROUP", members=(Axis(2, 1),), groups=(Axis(4, 2),))`` has
    the groups (0, 1), (2, 3), (4, 5) and (6, 7).
    """

    description: str
    """Megatron's ``group_desc``, or a name of ours for a group that is not Megatron's."""
    members: tuple[Axis, ...]
    groups: tuple[Axis, ...]
    """Axes along which the groups are counted. The first axis varies fastest."""
    backend: str = "nccl"
    origin: int = 0
    """Joint rank of the first member of the first group."""

    @property
    def size(self) -> int:
        """Number of members of each group."""
        return math.prod(axis.size for axis in self.members)

    @property
    def count(self) -> int:
        """Number of groups."""
        return math.prod(axis.size for axis in self.groups)

    @property
    def kind(self) -> GroupKind | None:
        """The kind of the groups; None if they are not groups of the training world."""
        return KINDS.get(self.description) or HOST_KINDS.get(self.description)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Ranks of a group's members relative to its first member, in ascending order."""
        found: Sequence[int] = (0,)
        for axis in self.members:
            found = [first + axis.stride * step for step in range(axis.size) for first in found]
        return tuple(sorted(found))

    def firsts(self) -> Iterator[int]:
        """Yields the first member of each group, in the order in which Megatron makes them."""
        found: Sequence[int] = (self.origin,)
        for axis in self.groups:
            found = [first + axis.stride * step for step in range(axis.size) for first in found]
        yield from found

    def all_ranks(self) -> Iterator[tuple[int, ...]]:
        """Yields the ranks of each group's members."""
        for first in self.firsts():
            yield tuple(first + offset for offset in self.offsets)

    def ranks_with(self, rank: int) -> tuple[int, ...] | None:
        """Returns the members of the group that contains a rank; None if no group contains it."""
        place = rank - self.origin
        first = self.origin + sum(place // axis.stride % axis.size * axis.stride for axis in self.groups)
        ranks = tuple(first + offset for offset in self.offsets)
        return ranks if rank in ranks else None

    def members_on_a_node(self, nodes: Sequence[int]) -> tuple[int, int]:
        """Returns the smallest and the largest number of members that a group has on one node.

        Args:
            nodes: See `crossing`.
        """
        if not self.crossing(nodes):
            return self.size, self.size
        counts = [count for ranks in self.all_ranks() for count in Counter(nodes[rank] for rank in ranks).values()]
        return min(counts), max(counts)

    def crossing(self, nodes: Sequence[int]) -> int:
        """Returns the number of groups with members on more than one node.

        Args:
            nodes: The node of each rank. Node numbers never decrease from one training rank to the next, nor from one
                rollout rank to the next.
        """
        span = self.offsets[-1]
        if not span:
            return 0
        return sum(nodes[first] != nodes[first + span] for first in self.firsts())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    description: str
    grid: str
    """The set of axes that spans the world. The axes that are not in ``members`` distinguish the groups."""
    members: tuple[str, ...]
    twin: str = ""
    """Name of a gloo group with the same ranks, which is made right after."""
    only_with_instances: bool = False
    since: str = RULES[0]


_HIERARCHICAL = "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP"
_TABLE = (
    _Rule(description="GTP_WEIGHT_REMAT_GROUP", grid="dense", members=(), since=_REMAT),
    _Rule(
        description="DATA_PARALLEL_GROUP_WITH_CP",
        grid="dense",
        members=("cp", "dp"),
        twin="DATA_PARALLEL_GROUP_WITH_CP_GLOO",
    ),
    _Rule(
        description="INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
        grid="dense_parts",
        members=("part",),
        twin="INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
        only_with_instances=True,
    ),
    _Rule(description="DATA_PARALLEL_GROUP", grid="dense", members=("dp",), twin="DATA_PARALLEL_GROUP_GLOO"),
    _Rule(description="CONTEXT_PARALLEL_GROUP", grid="dense", members=("cp",)),
    _Rule(description="MODEL_PARALLEL_GROUP", grid="dense", members=("tp", "pp")),
    _Rule(description="TENSOR_MODEL_PARALLEL_GROUP", grid="dense", members=("tp",)),
    _Rule(description="PIPELINE_MODEL_PARALLEL_GROUP", grid="dense", members=("pp",)),
    _Rule(description="EMBEDDING_GROUP", grid="ends", members=("ends",)),
    _Rule(description="POSITION_EMBEDDING_GROUP", grid="stage", members=()),
    _Rule(description="TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", grid="dense", members=("tp", "cp", "dp")),
    _Rule(description="TENSOR_AND_DATA_PARALLEL_GROUP", grid="dense", members=("tp", "dp")),
    _Rule(description="TENSOR_AND_CONTEXT_PARALLEL_GROUP", grid="dense", members=("tp", "cp")),
    _Rule(description="EXPERT_GTP_WEIGHT_REMAT_GROUP", grid="expert", members=(), since=_REMAT),
    _Rule(description="EXPERT_MODEL_PARALLEL_GROUP", grid="expert", members=("ep",)),
    _Rule(description="EXPERT_TENSOR_PARALLEL_GROUP", grid="expert", members=("etp",)),
    _Rule(description="EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", grid="expert", members=("etp", "ep")),
    _Rule(description="EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", grid="expert", members=("etp", "ep", "pp")),
    _Rule(
        description="EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
        grid="expert",
        members=("etp", "ep", "pp"),
        since=_REMAT,
    ),
    _Rule(
        description="EXPERT_DATA_PARALLEL_GROUP",
        grid="expert",
        members=("edp",),
        twin="EXPERT_DATA_PARALLEL_GROUP_GLOO",
    ),
    _Rule(
        description=f"{_HIERARCHICAL}_L0",
        grid="expert_parts",
        members=("part",),
        twin=f"{_HIERARCHICAL}_GLOO_L0",
        only_with_instances=True,
    ),
    _Rule(
        description=f"{_HIERARCHICAL}_L1",
        grid="expert_parts",
        members=("instance",),
        twin=f"{_HIERARCHICAL}_GLOO_L1",
        only_with_instances=True,
    ),
    _Rule(
        description="INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        grid="expert_parts",
        members=("etp", "ep", "part", "pp"),
    ),
)
"""The rules, in the order in which ``parallel_state.initialize_model_parallel`` makes the groups."""

_Grid = Mapping[str, Axis]


def _grids(layout: ParallelLayout, instances: int) -> dict[str, _Grid]:
    tensor, context, data, pipeline = layout.tensor, layout.context, layout.data, layout.pipeline
    stage = tensor * context * data
    copies, experts = context * data, layout.expert_tensor * layout.expert
    stages = Axis(pipeline, stage)
    tp, cp, dp = Axis(tensor, 1), Axis(context, tensor), Axis(data, tensor * context)
    etp, ep = Axis(layout.expert_tensor, 1), Axis(layout.expert, layout.expert_tensor)
    part, expert_part = copies // instances, layout.expert_data // instances
    return {
        "dense": {"tp": tp, "cp": cp, "dp": dp, "pp": stages},
        "dense_parts": {
            "tp": tp,
            "part": Axis(part, tensor),
            "instance": Axis(instances, tensor * part),
            "pp": stages,
        },
        "stage": {"tp": tp, "cp": cp, "dp": dp},
        "ends": {"tp": tp, "cp": cp, "dp": dp, "ends": Axis(min(pipeline, 2), stage * max(pipeline - 1, 1))},
        "expert": {"etp": etp, "ep": ep, "edp": Axis(layout.expert_data, experts), "pp": stages},
        "expert_parts": {
            "etp": etp,
            "ep": ep,
            "part": Axis(expert_part, experts),
            "instance": Axis(instances, experts * expert_part),
            "pp": stages,
        },
    }


def megatron_families(
    layout: ParallelLayout, *, instances: int = 1, rules: str = RULES[-1], gloo: bool = True
) -> list[GroupFamily]:
    """Returns the families of a training world, in the order in which megatron-core makes them.

    Args:
        layout: Sizes of the axes, already checked.
        instances: Number of optimizer instances. It divides the numbers of data-parallel and of expert-data-parallel
            ranks.
        rules: Version of megatron-core, one of `RULES`.
        gloo: Whether the data-parallel groups have gloo twins.

    >>> layout = ParallelLayout(world_size=4, tensor=2, pipeline=1, expert=2, expert_tensor=1, context=1)
    >>> [family] = [f for f in megatron_families(layout) if f.description == "EXPERT_DATA_PARALLEL_GROUP"]
    >>> list(family.all_ranks())
    [(0, 2), (1, 3)]
    """
    grids = _grids(layout, instances)
    found = []
    for rule in _TABLE:
        if RULES.index(rule.since) > RULES.index(rules) or (rule.only_with_instances and instances == 1):
            continue
        names = [(rule.description, "nccl"), *([(rule.twin, "gloo")] if rule.twin and gloo else [])]
        grid = grids[rule.grid]
        for description, backend in names:
            found.append(
                GroupFamily(
                    description=description,
                    backend=backend,
                    members=tuple(grid[name] for name in rule.members),
                    groups=tuple(axis for name, axis in grid.items() if name not in rule.members),
                )
            )
    return found


def host_families(layout: ParallelLayout, host: str) -> list[GroupFamily]:
    """Returns the families that a host makes in addition to Megatron's, in the order in which it makes them.

    >>> layout = ParallelLayout(world_size=8, tensor=1, pipeline=2, expert=2, expert_tensor=1, context=1)
    >>> [list(family.all_ranks()) for family in host_families(layout, "ms-swift")]
    [[(0, 1, 4, 5), (2, 3, 6, 7)]]
    """
    if host != "ms-swift":
        return []
    # mcore_bridge/bridge/gpt_bridge.py:96-116 does this in every job, even with one expert-parallel rank and one stage.
    grid = _grids(layout, instances=1)["expert"]
    members, others = (grid["ep"], grid["pp"]), (grid["etp"], grid["edp"])
    return [GroupFamily(description="EP-PP-GROUP", members=members, groups=others)]


def world_family(size: int) -> GroupFamily:
    """Returns the default group of a training world as a family of one group."""
    return GroupFamily(description=WORLD, members=(Axis(size, 1),), groups=())


JOINT, ENGINE = "JOINT_GROUP", "VLLM_ENGINE_GROUP"


def joint_family(size: int) -> GroupFamily:
    """Returns the group of trainers and rollout ranks that carries the weights."""
    return GroupFamily(description=JOINT, members=(Axis(size, 1),), groups=())


def engine_family(*, rollouts: int, size: int, first: int) -> GroupFamily:
    """Returns vLLM's engines as a family, by joint rank.

    Args:
        rollouts: Number of rollout ranks.
        size: Number of ranks of each engine.
        first: Joint rank of rollout rank 0.
    """
    return GroupFamily(
        description=ENGINE, members=(Axis(size, 1),), groups=(Axis(rollouts // size, size),), origin=first
    )
