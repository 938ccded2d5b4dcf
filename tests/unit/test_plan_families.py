"""Members of every group by arithmetic; against a real Megatron they are compared in tests/distributed."""

from __future__ import annotations

import pytest

from rl_safe_workers.plan.families import (
    ENGINE,
    GroupFamily,
    engine_family,
    joint_family,
    megatron_families,
    world_family,
)
from rl_safe_workers.topology.groups import Features, kinds_of
from rl_safe_workers.topology.layout import ParallelLayout

LAYOUT = ParallelLayout(world_size=16, tensor=2, pipeline=2, expert=4, expert_tensor=1, context=2)


def layout(world_size: int = 8, **sizes: int) -> ParallelLayout:
    ones = {"tensor": 1, "pipeline": 1, "expert": 1, "expert_tensor": 1, "context": 1}
    return ParallelLayout(world_size=world_size, **{**ones, **sizes})


def families(of: ParallelLayout, **how: object) -> dict[str, GroupFamily]:
    return {family.description: family for family in megatron_families(of, **how)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "instances"),
    [(LAYOUT, 1), (LAYOUT, 2), (layout(expert=2), 4), (layout(tensor=8, expert=8), 1), (layout(1), 1)],
)
def test_sizes_are_those_of_the_table_of_groups(of: ParallelLayout, instances: int) -> None:
    features = Features(optimizer_instances=instances)
    planned = families(of, instances=instances)
    for description, kind in list(kinds_of(of, features).items())[1:]:
        assert planned[description].size == kind.size(of, features), description


@pytest.mark.parametrize("instances", [1, 2])
def test_each_rank_is_once_in_every_kind_but_those_of_embeddings(instances: int) -> None:
    for description, family in families(LAYOUT, instances=instances).items():
        ranks = sorted(rank for group in family.all_ranks() for rank in group)
        expected = range(8) if description.startswith("POSITION") else range(16)
        assert ranks == list(expected), description


def test_of_four_stages_only_the_ends_hold_embeddings() -> None:
    assert list(families(layout(8, pipeline=4))["EMBEDDING_GROUP"].all_ranks()) == [(0, 6), (1, 7)]
    assert families(layout(8, pipeline=4))["EMBEDDING_GROUP"].ranks_with(2) is None


def test_a_rank_finds_the_group_that_lists_it() -> None:
    for family in families(LAYOUT, instances=2).values():
        for group in family.all_ranks():
            assert {family.ranks_with(rank) for rank in group} == {group}


def test_groups_for_weights_of_other_ranks_are_made_since_megatron_0_19() -> None:
    old, new = families(LAYOUT, rules="0.18"), families(LAYOUT, rules="0.19")
    assert set(new) - set(old) == {
        "GTP_WEIGHT_REMAT_GROUP",
        "EXPERT_GTP_WEIGHT_REMAT_GROUP",
        "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
    }
    assert families(LAYOUT, rules="0.16").keys() == old.keys()


def test_megatron_0_20_makes_the_groups_of_0_19_in_the_same_order() -> None:
    """Its parallel_state.py is that of 0.19.2, byte for byte."""
    for instances in (1, 2):
        old, new = (list(families(LAYOUT, rules=rules, instances=instances).values()) for rules in ("0.19", "0.20"))
        assert new == old


def test_gloo_twins_have_the_ranks_of_their_groups_and_can_be_left_out() -> None:
    found = families(LAYOUT, instances=2)
    twins = {name: family for name, family in found.items() if family.backend == "gloo"}
    assert len(twins) == 6
    assert all(list(f.all_ranks()) == list(found[name.replace("_GLOO", "")].all_ranks()) for name, f in twins.items())
    assert not any("GLOO" in name for name in families(LAYOUT, gloo=False))


@pytest.mark.parametrize(
    ("of", "description", "gpus", "crossing"),
    [
        (layout(16, tensor=4), "TENSOR_MODEL_PARALLEL_GROUP", 8, 0),
        (layout(16, tensor=4), "TENSOR_MODEL_PARALLEL_GROUP", 6, 1),
        (layout(16, tensor=4), "DATA_PARALLEL_GROUP", 8, 4),
        (layout(16, tensor=4), "DATA_PARALLEL_GROUP", 16, 0),
        (layout(16, tensor=16), "TENSOR_MODEL_PARALLEL_GROUP", 8, 1),
    ],
)
def test_groups_across_nodes_are_counted(of: ParallelLayout, description: str, gpus: int, crossing: int) -> None:
    assert families(of)[description].crossing([rank // gpus for rank in range(of.world_size)]) == crossing


def test_crossing_is_what_counting_nodes_gives() -> None:
    for gpus in (1, 3, 4, 5, 8):
        for family in families(LAYOUT, instances=2).values():
            counted = sum(len({rank // gpus for rank in group}) > 1 for group in family.all_ranks())
            nodes = [rank // gpus for rank in range(LAYOUT.world_size)]
            assert family.crossing(nodes) == counted, (gpus, family.description)


def test_engines_and_the_joint_group_are_counted_by_joint_rank() -> None:
    engines = engine_family(rollouts=4, size=2, first=6)
    assert list(engines.all_ranks()) == [(6, 7), (8, 9)]
    assert engines.ranks_with(5) is None
    assert engines.description == ENGINE
    assert list(joint_family(3).all_ranks()) == list(world_family(3).all_ranks()) == [(0, 1, 2)]


def test_the_members_of_131072_ranks_are_not_spelt_out() -> None:
    of = layout(131072, tensor=8, pipeline=16, expert=64)
    found = families(of)
    assert found["DATA_PARALLEL_GROUP_WITH_CP"].ranks_with(131071)[-1] == 131071
    assert found["EXPERT_DATA_PARALLEL_GROUP"].count == 1024
