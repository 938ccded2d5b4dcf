"""On which node ranks go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest

from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.topology.placement import DoesNotFitError, Placement, cut_groups, place, room

GPU = {"GPU": 1.0}


def layout(world_size: int, **sizes: int) -> ParallelLayout:
    ones = {"tensor": 1, "pipeline": 1, "expert": 1, "expert_tensor": 1, "context": 1}
    return ParallelLayout(world_size=world_size, **{**ones, **sizes})


def on_gpus(of: ParallelLayout, gpus: Sequence[int], rollouts: int = 0) -> Placement:
    return place(of, [{"GPU": float(count)} for count in gpus], trainer=GPU, rollout=GPU, rollouts=rollouts)


def counts(places: Sequence[int], nodes: int) -> list[int]:
    return [places.count(node) for node in range(nodes)]


@pytest.mark.parametrize(
    ("of", "gpus", "rollouts", "trainers", "generating"),
    [
        (layout(24, expert=8), [8] * 4, 8, [8, 8, 8, 0], [0, 0, 0, 8]),
        (layout(8, tensor=4), [6, 6], 4, [4, 4], [2, 2]),
        (layout(12, tensor=4), [6, 6], 0, [6, 6], [0, 0]),  # one group is cut whatever one does
        (layout(12, tensor=4), [6, 6, 6], 0, [4, 4, 4], [0, 0, 0]),
        (layout(8, tensor=2, expert=4), [3, 8, 8], 3, [0, 8, 0], [3, 0, 0]),
        (layout(16, tensor=16), [8, 8, 8], 0, [8, 8, 0], [0, 0, 0]),
        (layout(6, expert=3), [4, 4], 2, [3, 3], [1, 1]),
    ],
)
def test_groups_stay_whole_on_few_nodes_and_rollouts_apart(
    of: ParallelLayout, gpus: list[int], rollouts: int, trainers: list[int], generating: list[int]
) -> None:
    found = on_gpus(of, gpus, rollouts)
    assert counts(found.trainers, len(gpus)) == trainers
    assert counts(found.rollouts, len(gpus)) == generating
    assert list(found.trainers) == sorted(found.trainers)


def groups(of: ParallelLayout) -> dict[tuple[str, tuple[int, ...]], set[int]]:
    """Members of each tensor-, expert-tensor- and expert-parallel group, from the coordinates of ranks."""
    found: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for rank in range(of.world_size):
        at = of.coordinates(rank)
        found.setdefault(("tp", (at.context, at.data, at.pipeline)), set()).add(rank)
        found.setdefault(("etp", (at.expert, at.expert_data, at.pipeline)), set()).add(rank)
        found.setdefault(("ep", (at.expert_tensor, at.expert_data, at.pipeline)), set()).add(rank)
    return found


def cut_by(of: ParallelLayout, places: Sequence[int], largest: int) -> int:
    """Groups on two or more nodes, of those whose ranks, from the first to the last, would have room on one."""
    return sum(
        len({places[rank] for rank in members}) > 1
        for (_, _), members in groups(of).items()
        if max(members) - min(members) < largest
    )


def random_layouts(number: int) -> list[tuple[ParallelLayout, list[int]]]:
    chance, found = random.Random(0), []
    while len(found) < number:
        tensor, expert, expert_tensor = (chance.choice(of) for of in ((1, 2, 3, 4), (1, 2, 3, 4, 6), (1, 2)))
        world = chance.randint(1, 16)
        gpus = [chance.randint(2, 8) for _ in range(chance.randint(2, 4))]
        fits = not (world % tensor or world % (expert * expert_tensor)) and world <= sum(gpus)
        # Spans that interleave, as of expert groups with expert tensors, are counted by block.
        if fits and expert_tensor == 1:
            found.append((layout(world, tensor=tensor, expert=expert, expert_tensor=expert_tensor), gpus))
    return found


@pytest.mark.parametrize(("of", "gpus"), random_layouts(60), ids=str)
def test_no_way_of_sharing_ranks_out_cuts_fewer_groups(of: ParallelLayout, gpus: list[int]) -> None:
    largest = max(gpus)
    found = on_gpus(of, gpus)
    best = min(
        cut_by(of, [node for node, count in enumerate(way) for _ in range(count)], largest)
        for way in product(*(range(count + 1) for count in gpus))
        if sum(way) == of.world_size
    )
    assert cut_by(of, found.trainers, largest) == best


def test_each_expert_group_that_a_boundary_goes_through_counts() -> None:
    of = layout(8, expert=4, expert_tensor=2)
    assert [cut_groups(of, boundary, largest=8) for boundary in range(9)] == [0, 2, 2, 3, 2, 3, 2, 2, 0]
    assert cut_groups(of, 4, largest=4) == 0  # no node could hold one


def test_trainers_and_rollouts_may_need_different_amounts() -> None:
    trainer, rollout = {"CPU": 0.25}, {"CPU": 1.5}
    found = place(layout(8), [{"CPU": 2.0}] * 2, trainer=trainer, rollout=rollout, rollouts=1)
    assert (counts(found.trainers, 2), found.rollouts) == ([8, 0], (1,))
    # All trainers fit on the first node, and the second alone has no room for two rollout ranks.
    found = place(layout(4), [{"CPU": 2.5}] * 2, trainer=trainer, rollout=rollout, rollouts=2)
    assert (counts(found.trainers, 2), sorted(found.rollouts)) == ([4, 0], [0, 1])


def test_fewer_trainers_on_each_node_leave_room_for_rollouts_beside_them() -> None:
    nodes = [{"CPU": 6.0, "GPU": 8.0}] * 2
    found = place(layout(8), nodes, trainer={"CPU": 0.5, **GPU}, rollout={"CPU": 2.0, **GPU}, rollouts=4)
    assert (counts(found.trainers, 2), counts(found.rollouts, 2)) == ([4, 4], [2, 2])


def test_what_does_not_fit_says_how_much_would() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        on_gpus(layout(8), [4, 2], 2)
    assert (caught.value.trainers, caught.value.rollouts) == (6, 0)
    with pytest.raises(DoesNotFitError) as caught:
        on_gpus(layout(4), [4, 2], 3)
    assert (caught.value.trainers, caught.value.rollouts) == (4, 2)


def test_room_is_counted_in_the_grains_of_ray() -> None:
    assert room({"CPU": 0.3}, {"CPU": 0.1}) == 3
    assert room({"CPU": 2.0}, {"CPU": 0.25, "GPU": 1.0}) == 0
    assert room({"CPU": 2.0}, {}) == 0


def test_a_large_cluster_is_placed_in_a_moment() -> None:
    found = on_gpus(layout(98304, tensor=8, expert=8), [8] * 16384, 32768)
    assert found.trainers[-1] == 98304 // 8 - 1
    assert found.rollouts[0] == 98304 // 8


def test_where_no_size_divides_the_nodes_of_a_large_cluster_they_are_filled() -> None:
    found = on_gpus(layout(1020, tensor=3), [8] * 130)
    assert counts(found.trainers, 3) == [8, 8, 8]
