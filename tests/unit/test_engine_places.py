"""Where vLLM holds a weight: by rules, with sentences for what no weight is sent for."""

from __future__ import annotations

import pytest
import torch

from rl_safe_workers.rollout.engine_places import EnginePlaces, Place
from rl_safe_workers.rollout.protocol import WeightSpec

ATTENTION, EXPERTS = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def spec(name: str, *shape: int, dtype: str = "float32") -> WeightSpec:
    return WeightSpec(name=name, dtype=dtype, shape=shape)


QKV = [spec(f"{ATTENTION}.{part}_proj.bias", rows) for part, rows in (("k", 2), ("q", 4), ("v", 2))]


def where(specs: list[WeightSpec], *parameters: str) -> dict[str, tuple[str, int | None, int]]:
    found = EnginePlaces.of(specs, parameters)
    assert found.faults == found.unplaced == ()
    return {place.spec.name: (place.parameter, place.expert, place.start) for place in found.places}


def test_rows_of_a_joined_layer_come_in_the_order_of_the_rule_not_of_sending() -> None:
    whole = f"{ATTENTION}.qkv_proj.bias"
    assert where(QKV, whole) == {
        f"{ATTENTION}.k_proj.bias": (whole, None, 4),
        f"{ATTENTION}.q_proj.bias": (whole, None, 0),
        f"{ATTENTION}.v_proj.bias": (whole, None, 6),
    }


@pytest.mark.parametrize("inner", ["", ".routed_experts"])
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_an_expert_has_a_matrix_in_one_tensor(names: tuple[str, str, str], inner: str) -> None:
    gate, up, down = (f"{EXPERTS}.5.{name}.weight" for name in names)
    joined, last = f"{EXPERTS}{inner}.w13_weight", f"{EXPERTS}{inner}.w2_weight"
    specs = [spec(gate, 3, 4), spec(up, 3, 4), spec(down, 4, 3)]
    assert where(specs, joined, last) == {gate: (joined, 5, 0), up: (joined, 5, 3), down: (last, 5, 0)}


def test_an_embedding_is_expected_in_an_output_layer_for_which_nothing_is_sent() -> None:
    found = EnginePlaces.of([spec(EMBEDDING, 8, 2)], [EMBEDDING, HEAD])
    assert [(place.spec.name, place.parameter) for place in found.places] == [(EMBEDDING, EMBEDDING), (EMBEDDING, HEAD)]


def test_a_bias_that_is_not_sent_is_a_fault() -> None:
    norm = spec("model.norm.weight", 4)
    found = EnginePlaces.of([norm], ["model.norm.weight", f"{ATTENTION}.o_proj.bias"])
    assert found.faults == (f"{ATTENTION}.o_proj.bias: nothing is sent for it",)


def test_a_part_of_a_joined_layer_that_is_not_sent_is_a_fault() -> None:
    whole = f"{ATTENTION}.qkv_proj.bias"
    assert EnginePlaces.of(QKV[:1] + QKV[2:], [whole]).faults == (
        f"{ATTENTION}.q_proj.bias: not sent, and {whole} holds it",
    )
    assert EnginePlaces.of(QKV[:2], [whole]).gaps({whole: 8}) == [f"{whole}: 6 of its 8 elements are sent"]


def test_rows_that_pad_the_vocabulary_are_no_gap() -> None:
    assert EnginePlaces.of([spec(EMBEDDING, 6, 2)], [EMBEDDING]).gaps({EMBEDDING: 16}) == []


def test_a_weight_without_a_rule_is_told_and_its_layer_is_not_judged() -> None:
    found = EnginePlaces.of([spec("model.layers.0.mlp.experts.gate_up_proj", 8, 4, 6)], ["model.layers.0.mlp.x"])
    assert (found.unplaced, found.faults) == (("model.layers.0.mlp.experts.gate_up_proj",), ())


@pytest.mark.parametrize("shape", [(0,), (4,), (4, 3), (3, 4, 3)])
def test_a_parameter_in_the_layout_of_a_kernel_is_not_read(shape: tuple[int, ...]) -> None:
    place = Place(spec=spec("a.weight", 8, 4), parameter="a.weight")
    assert place.view_in(torch.zeros(shape)) is None


def test_an_expert_that_the_model_lacks_is_not_read() -> None:
    place = Place(spec=spec("a", 2, 2), parameter="a", expert=3)
    assert place.view_in(torch.zeros(3, 2, 2)) is None
    assert place.view_in(torch.zeros(4, 2, 2)) is not None


def test_a_parameter_in_a_wider_dtype_is_read_in_the_dtype_that_was_sent() -> None:
    place = Place(spec=spec("a", 2, dtype="bfloat16"), parameter="a")
    (wide, same, narrow) = (place.view_in(torch.ones(2, dtype=t)) for t in (torch.float32, torch.float16, torch.uint8))
    assert wide is not None
    assert wide.dtype == torch.bfloat16
    assert same is not None
    assert same.dtype == torch.float16
    assert narrow is not None
    assert narrow.dtype == torch.uint8
