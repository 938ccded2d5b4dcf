"""The table of groups, the limits that follow from it, and the memory that they will take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_safe_workers.config import MaxCtasConfig, MegatronConfig
from rl_safe_workers.errors import CommunicatorError, ConfigError
from rl_safe_workers.topology.budget import plan_limits
from rl_safe_workers.topology.comms_plan import CommsPlan
from rl_safe_workers.topology.groups import KINDS, Features, OpClass, connected_classes, context_exchange, kinds_of
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.topology.memory import KERNEL_BYTES, MIB, Links, costs, group_bytes, links_of

ALLTOALL = Features()
REDUCE, GATHER, ALL_TO_ALL = OpClass.REDUCE, OpClass.GATHER_SCATTER, OpClass.ALL_TO_ALL


def layout(world_size: int = 4, **sizes: int) -> ParallelLayout:
    ones = dict.fromkeys(("tensor", "pipeline", "expert", "expert_tensor", "context"), 1)
    return ParallelLayout(world_size=world_size, **{**ones, **sizes})


def classes(description: str, of: ParallelLayout, features: Features = ALLTOALL) -> set[OpClass]:
    kind = KINDS[description]
    return set(connected_classes(kind, kind.size(of, features), of, features))


@pytest.mark.parametrize(
    ("setting", "is_hybrid", "expected"),
    [
        (None, False, {OpClass.UNBATCHED_P2P}),
        ("all_gather", False, set()),
        ("a2a", False, {ALL_TO_ALL}),
        (["p2p", "a2a"], False, {ALL_TO_ALL, OpClass.UNBATCHED_P2P}),
        ("p2p", True, {ALL_TO_ALL, OpClass.UNBATCHED_P2P}),
    ],
)
def test_context_parallel_ranks_exchange_as_the_model_says(setting, is_hybrid, expected) -> None:
    features = Features(context_exchange=context_exchange(setting, is_hybrid=is_hybrid))
    assert classes("CONTEXT_PARALLEL_GROUP", layout(8, context=4), features) == {REDUCE, GATHER, *expected}


def test_context_parallel_ranks_that_only_exchange_connect_no_rings() -> None:
    only = Features(context_collectives=False)
    assert classes("CONTEXT_PARALLEL_GROUP", layout(4, context=2), only) == {OpClass.BATCHED_P2P}
    gathers = Features(context_collectives=False, context_exchange=context_exchange("all_gather"))
    assert classes("CONTEXT_PARALLEL_GROUP", layout(4, context=2), gathers) == {REDUCE, GATHER}


def test_every_limit_of_the_configuration_is_a_group_and_every_group_can_be_limited() -> None:
    assert set(MaxCtasConfig.model_fields) == {kind.key for kind in KINDS.values()}


@pytest.mark.parametrize(
    ("description", "features", "expected"),
    [
        ("WORLD", ALLTOALL, {REDUCE, GATHER}),
        ("WORLD", Features(background_saves=True), {REDUCE, GATHER, OpClass.ROOT_EXCHANGE}),
        ("EXPERT_DATA_PARALLEL_GROUP", ALLTOALL, {REDUCE, GATHER}),
        ("EXPERT_MODEL_PARALLEL_GROUP", ALLTOALL, {ALL_TO_ALL}),
        ("EXPERT_MODEL_PARALLEL_GROUP", Features(moe_dispatcher="allgather"), set()),
        ("EXPERT_MODEL_PARALLEL_GROUP", Features(moe_dispatcher="flex"), set()),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", ALLTOALL, {REDUCE, GATHER}),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", Features(moe_dispatcher="flex"), {REDUCE, GATHER}),
        ("DATA_PARALLEL_GROUP", ALLTOALL, set()),
        ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", Features(expert_bias=True), {REDUCE}),
        ("TENSOR_AND_CONTEXT_PARALLEL_GROUP", Features(aux_loss=True), set()),
        ("TENSOR_MODEL_PARALLEL_GROUP", ALLTOALL, {REDUCE}),
    ],
)
def test_what_a_group_carries_follows_from_what_it_is_for(description, features, expected) -> None:
    assert classes(description, layout(expert=2), features) == expected


@pytest.mark.parametrize(
    ("features", "expected"), [(Features(expert_bias=True), {REDUCE}), (Features(aux_loss=True, fp8=True), set())]
)
def test_one_rank_reduces_its_experts_biases_but_no_losses_and_scales(features: Features, expected: set) -> None:
    assert classes("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", layout(1), features) == expected


@pytest.mark.parametrize(
    ("batched", "shapes", "expected"),
    [
        (True, False, {OpClass.BATCHED_P2P}),
        (True, True, {OpClass.BATCHED_P2P}),
        (False, False, {OpClass.UNBATCHED_P2P}),
        (False, True, {OpClass.BATCHED_P2P, OpClass.UNBATCHED_P2P}),
        (False, None, {OpClass.BATCHED_P2P, OpClass.UNBATCHED_P2P}),
        (None, False, {OpClass.BATCHED_P2P, OpClass.UNBATCHED_P2P}),
    ],
)
def test_a_pipeline_is_connected_the_ways_it_sends_and_all_that_are_possible(batched, shapes, expected) -> None:
    features = Features(batched_p2p=batched, variable_seq_lengths=shapes)
    assert classes("PIPELINE_MODEL_PARALLEL_GROUP", layout(pipeline=2), features) == {REDUCE, *expected}


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


def test_a_plain_optimizer_reduces_its_norm_over_a_model_parallel_group_of_one_rank_too() -> None:
    assert classes("MODEL_PARALLEL_GROUP", layout(), Features(distributed_optimizer=False)) == {REDUCE}
    assert classes("MODEL_PARALLEL_GROUP", layout(), Features()) == set()


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


def test_a_world_that_carries_weights_keeps_its_channels() -> None:
    assert "world" not in plan_limits(layout(pipeline=2), Features(weights_over_world=True), {})


def test_what_carries_one_message_at_a_time_between_stages_gets_some() -> None:
    two, four = plan_limits(layout(pipeline=2), ALLTOALL, {}), plan_limits(layout(pipeline=4), ALLTOALL, {})
    assert (two["pp"], two["world"]) == (12, 12)
    assert (four["pp"], four["world"]) == (12, 1)


def test_an_override_wins_also_where_a_group_would_be_small() -> None:
    limits = plan_limits(layout(expert=2), ALLTOALL, {"ep_dp": 8, "world": 4})
    assert (limits["ep_dp"], limits["world"]) == (8, 4)


def test_an_override_of_no_group_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="expdp: there is no group of that name; did you mean ep_dp"):
        plan_limits(layout(), ALLTOALL, {"expdp": 4})


TWO_STAGES, NEIGHBOUR = Links(pairs=2, exchanges=1), Links(pairs=1, exchanges=1)
BATCHED, UNBATCHED = OpClass.BATCHED_P2P, OpClass.UNBATCHED_P2P


@pytest.mark.parametrize(
    ("of", "size", "max_ctas", "links", "measured_mib"),
    [
        *(
            ((REDUCE,), 4, ctas, NEIGHBOUR, [mib])
            for ctas, mib in ((None, 484), (20, 436), (16, 292), (12, 244), (8, 148), (4, 76), (1, 22))
        ),
        *(((REDUCE,), 1, ctas, NEIGHBOUR, [mib]) for ctas, mib in ((None, 388), (16, 100), (8, 52), (2, 16), (1, 10))),
        ((ALL_TO_ALL, REDUCE), 2, None, NEIGHBOUR, [580, 288]),
        ((ALL_TO_ALL, REDUCE), 2, 16, NEIGHBOUR, [292, 192]),
        ((ALL_TO_ALL, REDUCE), 2, 1, NEIGHBOUR, [22, 12]),
        ((REDUCE, GATHER, ALL_TO_ALL, BATCHED), 4, None, NEIGHBOUR, [484, 0, 1152, 0]),
        ((REDUCE, GATHER, ALL_TO_ALL, BATCHED), 4, 8, NEIGHBOUR, [148, 0, 288, 0]),
        ((BATCHED, REDUCE), 2, None, NEIGHBOUR, [580, 288]),
        ((UNBATCHED,), 2, None, NEIGHBOUR, [260 + 320]),
        ((REDUCE, BATCHED, UNBATCHED), 2, 16, Links(pairs=2, exchanges=2), [292, 192, 584]),
        ((UNBATCHED,), 2, 16, NEIGHBOUR, [132 + 160]),
        ((UNBATCHED,), 2, None, TWO_STAGES, [260 + 516]),
        ((UNBATCHED,), 2, 16, TWO_STAGES, [132 + 260]),
        ((REDUCE, UNBATCHED), 2, 1, TWO_STAGES, [22, 12 + 20]),
    ],
)
def test_the_model_is_what_was_measured(of, size, max_ctas, links, measured_mib) -> None:
    assert [size_bytes / MIB for size_bytes in costs(of, size=size, max_ctas=max_ctas, links=links)] == measured_mib


@pytest.mark.parametrize(
    ("of", "size", "near", "max_ctas", "measured_mib"),
    [
        *(((REDUCE, GATHER, ALL_TO_ALL), 2, 1, ctas, [16, 0, 0]) for ctas in (None, 2, 4, 24)),
        ((ALL_TO_ALL, REDUCE), 8, 1, None, [18, 0]),
        ((REDUCE, ALL_TO_ALL), 2, 1, 1, [10, 0]),
        ((UNBATCHED,), 2, 1, None, [18]),
        ((BATCHED,), 3, 1, None, [16]),
        ((ALL_TO_ALL,), 4, 2, None, [40]),
        ((ALL_TO_ALL,), 4, 2, 1, [22]),
    ],
)
def test_over_sockets_the_model_is_what_was_measured(of, size, near, max_ctas, measured_mib) -> None:
    found = costs(of, size=size, max_ctas=max_ctas, links=NEIGHBOUR, near=near)
    assert [size_bytes / MIB for size_bytes in found] == pytest.approx(measured_mib, abs=2)


def test_a_ring_through_several_hosts_has_at_most_the_neighbours_of_one_host() -> None:
    rings = [group_bytes((REDUCE,), size=8, max_ctas=None, links=NEIGHBOUR, near=near) / MIB for near in (1, 2, 4, 8)]
    assert rings == [16, 36, 40, 484]


def test_more_ctas_take_no_less_and_beyond_nccls_own_no_more() -> None:
    def reduction(ctas: int | None) -> int:
        return group_bytes((REDUCE,), size=4, max_ctas=ctas, links=NEIGHBOUR)

    sizes = [reduction(ctas) for ctas in range(1, 25)]
    assert sizes == sorted(sizes)
    assert reduction(64) == reduction(24) == reduction(None)


def test_two_stages_send_each_way_over_a_pair_of_its_own() -> None:
    pipeline = "PIPELINE_MODEL_PARALLEL_GROUP"
    assert links_of(pipeline, 2, Features()) == Links(pairs=2, exchanges=1)
    assert links_of(pipeline, 2, Features(virtual_pipeline=True)) == Links(pairs=2, exchanges=2)
    assert links_of(pipeline, 4, Features()) == links_of("CONTEXT_PARALLEL_GROUP", 4, Features()) == Links(2, 2)
    assert links_of("CONTEXT_PARALLEL_GROUP", 2, Features()) == Links(pairs=1, exchanges=1)


def test_kernels_are_part_of_what_must_be_free() -> None:
    plan = CommsPlan.of(layout(expert=2), ALLTOALL, {})
    assert plan.bytes == KERNEL_BYTES + sum(group.bytes for group in plan.groups)


def test_communicators_that_do_not_fit_are_refused_with_the_heaviest_and_what_helps() -> None:
    plan = CommsPlan.of(layout(expert=2), ALLTOALL, {})
    plan.check_fits(free_bytes=plan.bytes)
    with pytest.raises(CommunicatorError) as caught:
        plan.check_fits(free_bytes=plan.bytes - 1)
    message = str(caught.value)
    assert "EXPERT_DATA_PARALLEL_GROUP 484 MiB" in message
    assert "rl_safe.bootstrap.max_ctas.ep_dp=8" in message


def test_across_nodes_what_may_not_fit_is_warned_about_and_only_what_cannot_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = CommsPlan.of(layout(512, expert=256), ALLTOALL, {})
    (tokens,) = [group for group in plan.groups if group.description == "EXPERT_MODEL_PARALLEL_GROUP"]
    crossing = [group for group in plan.groups if group.size > 8]
    over_sockets = [
        group_bytes(
            g.classes, size=g.size, max_ctas=g.max_ctas, links=links_of(g.description, g.size, ALLTOALL), near=8
        )
        for g in crossing
    ]
    far = sum(group.bytes for group in crossing) - sum(over_sockets)
    assert tokens in crossing
    assert far > 0.9 * tokens.bytes
    plan.check_fits(free_bytes=plan.bytes - far, gpus_per_node=8)
    (record,) = caplog.records
    assert f"{far / MIB:.0f} of it in groups on several nodes" in record.getMessage()
    assert "rl_safe.bootstrap.max_ctas.ep=8" in record.getMessage()
    with pytest.raises(CommunicatorError, match="will take"):
        plan.check_fits(free_bytes=plan.bytes - far - 1, gpus_per_node=8)
    with pytest.raises(CommunicatorError, match="will take"):
        plan.check_fits(free_bytes=plan.bytes - far)


def test_a_smaller_budget_is_a_smaller_prediction() -> None:
    limited = CommsPlan.of(layout(expert=2), ALLTOALL, {"ep": 4, "ep_dp": 4, "dp_cp": 4})
    assert (
        sum(group.bytes for group in limited.groups)
        < sum(group.bytes for group in CommsPlan.of(layout(expert=2), ALLTOALL, {}).groups) / 4
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


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, False), ({"fp8": "hybrid"}, True), ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, False)],
)
def test_only_delayed_scales_of_8_bit_layers_are_reduced(settings: dict[str, str], expected: bool) -> None:
    features = Features.of(MegatronConfig(**settings))
    assert features.fp8 is expected
    found = classes("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", layout(4), features)
    assert found == ({REDUCE} if expected else set())
