"""Parallel layouts: coordinates, and refusals that name sizes that would work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rl_safe_workers.errors import LayoutError, ModelError
from rl_safe_workers.topology.layout import (
    ModelShape,
    ParallelLayout,
    RankCoordinates,
    check_layout,
    check_model,
    check_trainable,
    divisors,
)

QUICKSTART = ParallelLayout(world_size=4, tensor=1, pipeline=1, expert=2, expert_tensor=1, context=1)
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "vocab_size": 128,
    "hidden_size": 128,
    "max_position_embeddings": 512,
    "rope_scaling": None,
    "mlp_only_layers": [],
}
SHAPE = ModelShape.from_hf_config(QWEN3_MOE)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DENSE = replace(SHAPE, model_type="qwen3", num_experts=0)


def layout(world_size: int, **sizes: int) -> ParallelLayout:
    ones = dict.fromkeys(("tensor", "pipeline", "expert", "expert_tensor", "context"), 1)
    return ParallelLayout(world_size=world_size, **{**ones, **sizes})


@pytest.mark.parametrize(
    "case",
    [
        layout(4, expert=2),
        layout(4, tensor=2, expert=2),
        layout(4, pipeline=2, expert=2),
        layout(8, tensor=2, pipeline=2, expert=2, expert_tensor=2),
        layout(16, tensor=2, context=2, pipeline=2, expert=4),
        layout(24, tensor=3, pipeline=2, expert=2, expert_tensor=1),
    ],
    ids=lambda case: f"{case.world_size}-t{case.tensor}p{case.pipeline}e{case.expert}x{case.expert_tensor}",
)
def test_coordinates_are_megatrons(case: ParallelLayout) -> None:
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=case.tensor, ep=1, dp=case.data, pp=case.pipeline, cp=case.context, order=order)
    expert = RankGenerator(
        tp=case.expert_tensor, ep=case.expert, dp=case.expert_data, pp=case.pipeline, cp=1, order=order
    )
    for rank in range(case.world_size):
        assert case.coordinates(rank) == RankCoordinates(
            tensor=position(dense, "tp", rank),
            context=position(dense, "cp", rank),
            data=position(dense, "dp", rank),
            pipeline=position(dense, "pp", rank),
            expert_tensor=position(expert, "tp", rank),
            expert=position(expert, "ep", rank),
            expert_data=position(expert, "dp", rank),
        )


def position(generator: Any, token: str, training_rank: int) -> int:
    """Returns the place of a rank within the one group of that kind that holds it."""
    (group,) = [ranks for ranks in generator.get_ranks(token) if training_rank in ranks]
    return int(group.index(training_rank))


def test_the_quickstart_has_four_replicas_and_two_of_each_expert() -> None:
    check_layout(QUICKSTART)
    check_model(QUICKSTART, SHAPE)
    assert (QUICKSTART.data, QUICKSTART.expert_data) == (4, 2)


@pytest.mark.parametrize("rank", [-1, 4])
def test_coordinates_refuse_a_rank_outside_the_world(rank: int) -> None:
    with pytest.raises(LayoutError, match=f"training rank {rank} is outside a training world of 4 ranks"):
        QUICKSTART.coordinates(rank)


def test_a_world_that_does_not_factor_is_refused_with_sizes_that_do() -> None:
    with pytest.raises(LayoutError) as caught:
        check_layout(layout(6, tensor=2, pipeline=2))
    assert str(caught.value) == (
        "6 trainers do not divide by tensor 2 x context 1 x pipeline 2 = 4: set cluster.num_trainers to 4 or 8, "
        "or megatron.tensor_model_parallel_size to 1 or 3, or megatron.pipeline_model_parallel_size to 1 or 3"
    )


def test_expert_sizes_must_factor_the_world_too() -> None:
    with pytest.raises(LayoutError, match="expert_tensor 1 x expert 3 x pipeline 1 = 3: set cluster.num_trainers to 3"):
        check_layout(layout(4, expert=3))


def test_sizes_that_are_offered_do_work() -> None:
    for size in (1, 2, 4):
        check_layout(layout(4, expert=size))
    with pytest.raises(LayoutError, match="megatron.expert_model_parallel_size to 1, 2 or 4"):
        check_layout(layout(4, expert=3))


def test_a_world_smaller_than_one_replica_is_offered_only_the_larger_one() -> None:
    with pytest.raises(LayoutError, match="set cluster.num_trainers to 4, or"):
        check_layout(layout(2, tensor=4))


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(LayoutError, match="megatron.context_parallel_size=0 must be at least 1"):
        check_layout(layout(4, context=0))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pipeline": 3}, "2 layers do not divide by megatron.pipeline_model_parallel_size=3: set it to 1 or 2"),
        ({"tensor": 3}, "4 attention heads do not divide by megatron.tensor_model_parallel_size=3"),
        ({"tensor": 4}, "2 key-value heads do not divide by megatron.tensor_model_parallel_size=4: set it to 1 or 2"),
        ({"expert": 3}, "8 experts do not divide by megatron.expert_model_parallel_size=3: set it to 1, 2, 4 or 8"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_model(layout(12, **sizes), SHAPE)


def test_a_vocabulary_that_does_not_divide_is_refused() -> None:
    with pytest.raises(LayoutError, match="129 vocabulary entries do not divide"):
        check_model(layout(4, tensor=2), replace(SHAPE, vocab_size=129))


def test_expert_parallelism_of_a_dense_model_is_refused() -> None:
    check_model(layout(4, tensor=2), DENSE)
    with pytest.raises(LayoutError, match="megatron.expert_model_parallel_size=2, but a qwen3 model has no experts"):
        check_model(layout(4, expert=2), DENSE)


def test_divisors_of_a_square_come_once() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_a_dense_model_has_no_experts() -> None:
    assert ModelShape.from_hf_config({**QWEN3_MOE, "model_type": "qwen3"}) == DENSE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model type 'gpt2' is not supported: use llama, qwen2, .* or qwen3_moe"),
        ({"model_type": None}, "model type None is not supported"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None: it must be a whole number of 1"),
        ({"num_experts": 0}, "num_experts=0: it must be a whole number of 1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\], which is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=dict, which is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "type 'yarn' is not supported for qwen3_moe"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn': it must be an object"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "type 'yarn' is not supported for qwen3_moe"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 2.0}}, "high_freq_factor=2.0: only 4 is supported"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias=True, which is not supported"),
        ({"model_type": "deepseek_v3", "rope_parameters": LLAMA3}, "type 'llama3' is not supported for deepseek_v3"),
        ({"model_type": "gpt_oss", "rope_parameters": LLAMA3}, "type 'llama3' is not supported for gpt_oss"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv=8.0, which is not supported"),
    ],
)
def test_an_unsupported_model_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelShape.from_hf_config({**QWEN3_MOE, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "glm4_moe", "attention_bias": True},
        {"model_type": "gpt_oss", "attention_bias": True, "rope_parameters": {"rope_type": "yarn", "factor": 32.0}},
        {"model_type": "olmoe", "clip_qkv": None},
        {"model_type": "llama", "rope_scaling": LLAMA3},
        {"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn", "factor": 40}},
    ],
)
def test_what_a_family_is_published_with_is_accepted(change: dict[str, Any]) -> None:
    assert ModelShape.from_hf_config({**QWEN3_MOE, **change}).model_type == change["model_type"]


@pytest.mark.parametrize("name", ["num_local_experts", "n_routed_experts", "num_experts"])
def test_every_spelling_of_the_number_of_experts_is_read(name: str) -> None:
    renamed = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"} | {name: 8}
    assert ModelShape.from_hf_config(renamed) == SHAPE


@pytest.mark.parametrize(
    ("sizes", "experts", "is_refused"),
    [
        ({"tensor": 2, "expert_tensor": 1, "expert": 1}, 8, True),
        ({"tensor": 2, "expert_tensor": 1, "expert": 2}, 8, False),
        ({"tensor": 2, "expert_tensor": 2, "expert": 1}, 8, False),
        ({"tensor": 2, "expert_tensor": 1, "expert": 1}, 0, False),
    ],
)
def test_copies_of_an_expert_that_would_be_trained_apart_are_refused(sizes, experts, is_refused) -> None:
    layout = ParallelLayout(world_size=4, pipeline=1, context=1, **sizes)
    shape = replace(SHAPE, num_experts=experts)
    if not is_refused:
        check_trainable(layout, shape)
        return
    with pytest.raises(LayoutError, match="set megatron.expert_tensor_parallel_size to 2, or"):
        check_trainable(layout, shape)
