"""The table of groups, the limits that follow from it, and the memory that they will take."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from rl_safe_workers.config import MaxCtasConfig, MegatronConfig
from rl_safe_workers.errors import CommunicatorError, ConfigError
from rl_safe_workers.topology.budget import plan_limits
from rl_safe_workers.topology.comms_plan import CommsPlan
from rl_safe_workers.topology.groups import KINDS, Features, OpClass, connected_classes, kinds_of
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.topology.memory import MIB, class_bytes, group_bytes

ALLTOALL = Features()
REDUCE, GATHER, ALL_TO_ALL = OpClass.REDUCE, OpClass.GATHER_SCATTER, OpClass.ALL_TO_ALL


def layout(world_size: int = 4, **sizes: int) -> ParallelLayout:
    ones = dict.fromkeys(("tensor", "pipeline", "expert", "expert_tensor", "context"), 1)
    return ParallelLayout(world_size=world_size, **{**ones, **sizes})


def classes(description: str, of: ParallelLayout, features: Features = ALLTOALL) -> set[OpClass]:
    kind = KINDS[description]
    return set(connected_classes(kind, kind.size(of, features), of, features))


def test_every_limit_of_the_configuration_is_a_group_and_every_group_can_be_limited() -> None:
    assert {field.name for field in fields(MaxCtasConfig)} == {kind.key for kind in KINDS.values()}


@pytest.mark.parametrize(
    ("description", "features", "expected"),
    [
        ("WORLD", ALLTOALL, {REDUCE, GATHER}),
        ("EXPERT_DATA_PARALLEL_GROUP", ALLTOALL, {REDUCE, GATHER}),
        ("EXPERT_MODEL_PARALLEL_GROUP", ALLTOALL, {ALL_TO_ALL}),
        ("EXPERT_MODEL_PARALLEL_GROUP", Features(moe_dispatcher="allgather"), set()),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", ALLTOALL, {REDUCE, GATHER}),
        ("DATA_PARALLEL_GROUP", ALLTOALL, set()),
        ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", Features(expert_bias=True), {REDUCE}),
        ("TENSOR_AND_CONTEXT_PARALLEL_GROUP", Features(aux_loss=True), set()),
        ("TENSOR_MODEL_PARALLEL_GROUP", ALLTOALL, {REDUCE}),
    ],
)
def test_what_a_group_carries_follows_from_what_it_is_for(description, features, expected) -> None:
    assert classes(description, layout(expert=2), features) == expected


def test_a_pipeline_is_connected_the_way_it_sends_and_both_ways_if_that_is_not_known() -> None:
    two, ways = layout(pipeline=2), {OpClass.BATCHED_P2P, OpClass.UNBATCHED_P2P}
    for batched, expected in ((True, {OpClass.BATCHED_P2P}), (False, {OpClass.UNBATCHED_P2P}), (None, ways)):
        assert classes("PIPELINE_MODEL_PARALLEL_GROUP", two, Features(batched_p2p=batched)) == {REDUCE, *expected}


@pytest.mark.parametrize(("context", "expected"), [(2, OpClass.BATCHED_P2P), (4, OpClass.UNBATCHED_P2P)])
def test_context_parallelism_is_connected_the_way_transformer_engine_sends(context: int, expected: OpClass) -> None:
    assert classes("CONTEXT_PARALLEL_GROUP", layout(8, context=context)) == {REDUCE, GATHER, expected}


@pytest.mark.parametrize("moe", [None, False])
def test_without_experts_no_expert_group_is_connected(moe: bool | None) -> None:
    of, features = layout(8, tensor=2, expert_tensor=2), Features(moe=moe)
    for description in KINDS:
        if "EXPERT" in description:
            assert classes(description, of, features) == set()


def test_experts_without_expert_parallelism_are_reduced_with_all_else() -> None:
    of, features = layout(8, tensor=2, expert_tensor=2), Features(moe=True)
    assert classes("EXPERT_DATA_PARALLEL_GROUP", of, features) == set()
    assert classes("EXPERT_TENSOR_PARALLEL_GROUP", of, features) == {REDUCE, GATHER}


def test_without_a_distributed_optimizer_the_norms_go_over_other_groups() -> None:
    of, features = layout(expert=2, tensor=2), Features(distributed_optimizer=False)
    for description in ("MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"):
        assert classes(description, of) == set()
        assert classes(description, of, features) == {REDUCE}


def test_a_dense_model_has_nothing_to_connect_on_expert_groups_of_one_rank() -> None:
    for description in ("EXPERT_MODEL_PARALLEL_GROUP", "EXPERT_TENSOR_PARALLEL_GROUP"):
        assert classes(description, layout(tensor=2), Features(moe=True)) == set()


def test_partial_groups_exist_only_with_several_optimizer_instances() -> None:
    partial = {"intra_dp_cp", "intra_ep_dp", "inter_ep_dp"}
    assert partial.isdisjoint(kind.key for kind in kinds_of(layout(), ALLTOALL).values())
    assert partial <= {kind.key for kind in kinds_of(layout(), Features(optimizer_instances=2)).values()}


def test_scalars_and_lonely_ranks_get_one_channel_and_bandwidth_keeps_its_own() -> None:
    limits = plan_limits(layout(expert=2), ALLTOALL, {})
    assert {"world", "intra_dist_opt_instance", "tp_ep_mp", "tp", "pp", "mp"} <= limits.keys()
    assert {"ep", "ep_dp", "dp_cp"}.isdisjoint(limits)
    assert set(limits.values()) == {1}


def test_a_world_that_carries_weights_or_activations_keeps_its_channels() -> None:
    assert "world" not in plan_limits(layout(), Features(weights_over_world=True), {})
    assert "world" not in plan_limits(layout(pipeline=2), ALLTOALL, {})


def test_an_override_wins_also_where_a_group_would_be_small() -> None:
    limits = plan_limits(layout(expert=2), ALLTOALL, {"ep_dp": 8, "world": 4})
    assert (limits["ep_dp"], limits["world"]) == (8, 4)


def test_an_override_of_no_group_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="expdp: there is no group of that name; did you mean ep_dp"):
        plan_limits(layout(), ALLTOALL, {"expdp": 4})


@pytest.mark.parametrize(
    ("op_class", "size", "max_ctas", "measured_mib"),
    [
        (REDUCE, 4, None, 484), (REDUCE, 2, None, 484), (REDUCE, 4, 16, 292), (REDUCE, 4, 8, 149), (REDUCE, 4, 1, 22),
        (REDUCE, 1, None, 389), (REDUCE, 1, 1, 12), (ALL_TO_ALL, 4, None, 1152), (ALL_TO_ALL, 2, None, 384),
        (ALL_TO_ALL, 4, 16, 576), (ALL_TO_ALL, 4, 12, 576), (ALL_TO_ALL, 4, 8, 288), (ALL_TO_ALL, 4, 4, 144),
        (ALL_TO_ALL, 4, 2, 72), (ALL_TO_ALL, 4, 1, 36), (OpClass.UNBATCHED_P2P, 2, None, 262),
    ],
)  # fmt: skip
def test_the_model_is_within_15_percent_of_what_was_measured(op_class, size, max_ctas, measured_mib) -> None:
    assert class_bytes(op_class, size=size, max_ctas=max_ctas) / MIB == pytest.approx(measured_mib, rel=0.15)


def test_limits_between_those_measured_lie_between_them() -> None:
    sizes = [class_bytes(REDUCE, size=4, max_ctas=ctas) for ctas in (4, 5, 6, 7, 8)]
    assert sizes == sorted(sizes)
    assert class_bytes(REDUCE, size=4, max_ctas=64) == class_bytes(REDUCE, size=4, max_ctas=None)


def test_gathers_use_the_channels_of_reductions() -> None:
    both = group_bytes((REDUCE, GATHER), size=4, max_ctas=None)
    assert both == class_bytes(REDUCE, size=4, max_ctas=None)


def test_communicators_that_do_not_fit_are_refused_with_the_heaviest_and_what_helps() -> None:
    plan = CommsPlan.of(layout(expert=2), ALLTOALL, {})
    plan.check_fits(free_bytes=plan.bytes)
    with pytest.raises(CommunicatorError) as caught:
        plan.check_fits(free_bytes=plan.bytes - 1)
    message = str(caught.value)
    assert "EXPERT_DATA_PARALLEL_GROUP 484 MiB" in message
    assert "rl_safe.bootstrap.max_ctas.ep_dp=8" in message


def test_a_smaller_budget_is_a_smaller_prediction() -> None:
    small = {"ep": 4, "ep_dp": 4, "dp_cp": 4}
    assert (
        CommsPlan.of(layout(expert=2), ALLTOALL, small).bytes < CommsPlan.of(layout(expert=2), ALLTOALL, {}).bytes / 4
    )


def test_features_come_from_the_configuration() -> None:
    config = MegatronConfig(moe_token_dispatcher_type="allgather", num_distributed_optimizer_instances=2)
    found = Features.of(config, colocated=True)
    assert found == replace(ALLTOALL, moe_dispatcher="allgather", optimizer_instances=2, weights_over_world=True)


@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl"])
def test_torchs_own_backends_have_what_is_needed(backend: str) -> None:
    CommsPlan.of(layout(expert=2), ALLTOALL, {}).check_backend(backend)


@pytest.mark.parametrize(
    ("backend", "complaint"),
    [
        ("mpi", "DATA_PARALLEL_GROUP.* will carry gather_scatter, which backend mpi lacks"),
        ("cpu:gloo,cuda:carrier_pigeon", "backend carrier_pigeon is not known: use one of gloo, nccl, rl_safe_gloo"),
    ],
)
def test_a_backend_that_lacks_an_op_class_is_refused(backend: str, complaint: str) -> None:
    with pytest.raises(CommunicatorError, match=complaint):
        CommsPlan.of(layout(expert=2), ALLTOALL, {}).check_backend(backend)


def test_without_a_budget_only_overrides_limit() -> None:
    plan = CommsPlan.of(layout(expert=2), ALLTOALL, {"ep_dp": 4}, budget=False)
    assert plan.limits == {"ep_dp": 4}
