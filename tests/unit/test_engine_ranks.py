"""Ranks of a tensor-parallel engine: their cuts of the weights together are what was sent, or the weight is named."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from rl_safe_workers.rollout.cuts import EngineRank
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.read_back import ReadBack
from rl_safe_workers.rollout.sync_proof import HeldWeights
from tests.slow_digest import slow_digest

LAYER = "model.layers.0"
HEAD_DIM, KV_HEADS, VOCABULARY, EXPERTS = 4, 2, 70, 3
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, 16),
    f"{LAYER}.self_attn.q_proj.weight": (8 * HEAD_DIM, 16),
    f"{LAYER}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 16),
    f"{LAYER}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 16),
    f"{LAYER}.self_attn.q_proj.bias": (8 * HEAD_DIM,),
    f"{LAYER}.self_attn.k_proj.bias": (KV_HEADS * HEAD_DIM,),
    f"{LAYER}.self_attn.v_proj.bias": (KV_HEADS * HEAD_DIM,),
    f"{LAYER}.self_attn.o_proj.weight": (16, 8 * HEAD_DIM),
    f"{LAYER}.mlp.gate.weight": (EXPERTS, 16),
    **{f"{LAYER}.mlp.experts.{one}.{part}_proj.weight": (24, 16) for one in range(EXPERTS) for part in ("gate", "up")},
    **{f"{LAYER}.mlp.experts.{one}.down_proj.weight": (16, 24) for one in range(EXPERTS)},
    "model.norm.weight": (16,),
}
SPECS = [WeightSpec(name=name, dtype="float32", shape=shape) for name, shape in SHAPES.items()]
Weights = dict[str, torch.Tensor]


def weights() -> Weights:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parameters(held: Weights, rank: int, size: int, *, expert_parallel: bool = False) -> Weights:
    """Returns the parameters of a rank, by this test's own knowledge of vLLM."""
    expert_size = 1 if expert_parallel else size

    def rows(name: str, parts: int = size) -> torch.Tensor:
        return held[f"{LAYER}.{name}"].chunk(parts)[rank * parts // size]

    def qkv(leaf: str) -> torch.Tensor:
        kv = min(size, KV_HEADS)
        return torch.cat([rows(f"self_attn.{part}_proj.{leaf}", kv if part != "q" else size) for part in "qkv"])

    padded = torch.cat([held["model.embed_tokens.weight"], torch.zeros(128 - VOCABULARY, 16)])
    mine = [*range(EXPERTS)]
    if expert_parallel:
        mine = {1: [mine], 2: [[0, 1], [2]], 4: [[0], [1], [2], []]}[size][rank]
    parts = [f"mlp.experts.{one}" for one in mine]
    joined = [torch.empty(0, 48 // expert_size, 16)]
    joined += [
        torch.cat([rows(f"{one}.{part}_proj.weight", expert_size) for part in ("gate", "up")])[None] for one in parts
    ]
    last = [torch.empty(0, 16, 24 // expert_size)]
    last += [
        held[f"{LAYER}.{one}.down_proj.weight"].chunk(expert_size, dim=1)[rank % expert_size][None] for one in parts
    ]
    return {
        "model.embed_tokens.weight": padded.chunk(size)[rank],
        f"{LAYER}.self_attn.qkv_proj.weight": qkv("weight"),
        f"{LAYER}.self_attn.qkv_proj.bias": qkv("bias"),
        f"{LAYER}.self_attn.o_proj.weight": held[f"{LAYER}.self_attn.o_proj.weight"].chunk(size, dim=1)[rank],
        f"{LAYER}.mlp.gate.weight": held[f"{LAYER}.mlp.gate.weight"],
        f"{LAYER}.mlp.experts.routed_experts.w13_weight": torch.cat(joined),
        f"{LAYER}.mlp.experts.routed_experts.w2_weight": torch.cat(last),
        "model.norm.weight": held["model.norm.weight"],
    }


def model_of(held: Weights) -> nn.Module:
    root = nn.Module()
    for name, tensor in held.items():
        *modules, leaf = name.split(".")
        owner = root
        for module in modules:
            if module not in dict(owner.named_children()):
                owner.add_module(module, nn.Module())
            owner = owner.get_submodule(module)
        owner.register_parameter(leaf, nn.Parameter(tensor.clone()))
    return root


def read(models: list[nn.Module], *, expert_parallel: bool = False) -> HeldWeights:
    return HeldWeights.of_engine(
        [
            ReadBack(model, SPECS, rank).finish()
            for rank, model in zip(ranks_of(len(models), expert_parallel=expert_parallel), models, strict=True)
        ]
    )


def ranks_of(size: int, *, expert_parallel: bool) -> list[EngineRank]:
    return [
        EngineRank(rank=rank, size=size, kv_heads=KV_HEADS, expert_parallel=expert_parallel) for rank in range(size)
    ]


def models_of(held: Weights, size: int, *, expert_parallel: bool = False) -> list[nn.Module]:
    return [model_of(parameters(held, rank, size, expert_parallel=expert_parallel)) for rank in range(size)]


SENT = {name: slow_digest(tensor) for name, tensor in weights().items()}


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_weights_of_an_engine_are_proved(size: int, expert_parallel: bool) -> None:
    held = read(models_of(weights(), size, expert_parallel=expert_parallel), expert_parallel=expert_parallel)
    assert held.differences(SENT) == []
    assert held.unread == ()
    assert {name for name, _ in held.digests} == set(SHAPES)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_wrong_element_on_the_last_rank_is_found(name: str, size: int) -> None:
    models, wrong = models_of(weights(), size), weights()
    wrong[name].view(-1)[-1] += 1
    if name == "model.embed_tokens.weight" and size == 4:
        models[2] = model_of(parameters(wrong, 2, size))  # the last rank has padding alone
    else:
        models[-1] = model_of(parameters(wrong, size - 1, size))
    found = read(models).differences(SENT)
    assert len(found) == 1
    assert found[0].startswith(f"{name}: ")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", sorted(name for name in SHAPES if ".experts." in name))
def test_a_wrong_element_of_an_expert_is_found_on_the_rank_that_holds_it(name: str, size: int) -> None:
    wrong = weights()
    wrong[name].view(-1)[-1] += 1
    found = read(models_of(wrong, size, expert_parallel=True), expert_parallel=True).differences(SENT)
    assert [text.partition(":")[0] for text in found] == [name]


def test_experts_of_two_ranks_in_each_others_place_are_found() -> None:
    models = models_of(weights(), 4, expert_parallel=True)
    for name in ("w13_weight", "w2_weight"):
        first, second = (model.get_submodule(f"{LAYER}.mlp.experts.routed_experts") for model in models[:2])
        one, other = getattr(first, name), getattr(second, name)
        setattr(first, name, other)
        setattr(second, name, one)
    found = read(models, expert_parallel=True).differences(SENT)
    assert {text.partition(":")[0] for text in found} == {
        f"{LAYER}.mlp.experts.{one}.{part}_proj.weight" for one in range(2) for part in ("gate", "up", "down")
    }


def test_an_expert_that_no_rank_holds_is_told_as_not_proved() -> None:
    models = models_of(weights(), 2, expert_parallel=True)
    layer = models[1].get_submodule(f"{LAYER}.mlp.experts.routed_experts")
    layer.w2_weight = nn.Parameter(torch.empty(0, 16, 24))
    held = read(models, expert_parallel=True)
    assert held.unread == (f"{LAYER}.mlp.experts.2.down_proj.weight",)


def changed(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, nn.Parameter(tensor))


def test_experts_that_vllm_pads_on_each_rank_are_told_as_not_proved() -> None:
    """vLLM does so for FlashInfer's TRT-LLM kernels: `up_proj` then begins at the padded half."""
    models, experts = models_of(weights(), 2), f"{LAYER}.mlp.experts.routed_experts"
    for model in models:
        first = model.get_parameter(f"{experts}.w13_weight").detach()
        halves = [nn.functional.pad(half, (0, 0, 0, 4)) for half in first.chunk(2, dim=1)]
        changed(model, f"{experts}.w13_weight", torch.cat(halves, dim=1))
        last = model.get_parameter(f"{experts}.w2_weight").detach()
        changed(model, f"{experts}.w2_weight", nn.functional.pad(last, (0, 4)))
    held = read(models)
    assert held.differences(SENT) == []
    assert set(held.unread) == {name for name in SHAPES if ".experts." in name}


def test_a_layer_with_other_key_value_heads_than_the_model_is_told_as_not_proved() -> None:
    models, name = models_of(weights(), 4), f"{LAYER}.self_attn.qkv_proj.weight"
    for rank, model in enumerate(models):
        q, k, v = (weights()[f"{LAYER}.self_attn.{part}_proj.weight"].chunk(4)[rank] for part in "qkv")
        changed(model, name, torch.cat([q, k, v]))
    held = read(models)
    assert held.differences(SENT) == []
    assert set(held.unread) == {f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv"}


def test_a_weight_that_is_sent_as_the_joined_layer_is_told_as_not_proved() -> None:
    spec = WeightSpec(name=f"{LAYER}.mlp.gate_up_proj.weight", dtype="float32", shape=(8, 4))
    model = model_of({spec.name: torch.zeros(4, 4)})
    held = ReadBack(model, [spec], EngineRank(rank=0, size=2)).finish()
    assert (held.unread, held.faults) == ((spec.name,), ())
    whole = ReadBack(model_of({spec.name: torch.ones(8, 4)}), [spec]).finish()
    assert whole.differences({spec.name: slow_digest(torch.ones(8, 4))}) == []


def test_a_query_projection_of_its_own_is_cut_by_rows() -> None:
    """As in DeepSeek-V2-Lite, whose latent attention has no low-rank queries."""
    spec = WeightSpec(name=f"{LAYER}.self_attn.q_proj.weight", dtype="float32", shape=(8, 4))
    whole = torch.arange(32.0).view(8, 4)
    ranks = ranks_of(2, expert_parallel=False)
    held = HeldWeights.of_engine(
        [
            ReadBack(model_of({spec.name: part}), [spec], rank).finish()
            for rank, part in zip(ranks, whole.chunk(2), strict=True)
        ]
    )
    assert held.differences({spec.name: slow_digest(whole)}) == []
    assert held.unread == ()


def test_answers_of_workers_that_have_come_as_json_are_joined() -> None:
    told = [
        ReadBack(model, SPECS, rank).finish().as_dict()
        for rank, model in zip(ranks_of(2, expert_parallel=False), models_of(weights(), 2), strict=True)
    ]
    held = HeldWeights.of_workers(json.loads(json.dumps(told)))
    assert held is not None
    assert held.differences(SENT) == []
    assert HeldWeights.of_workers([None, None]) is None
    half = HeldWeights.of_workers([told[0], None])
    assert half is not None
    assert half.differences(SENT)[0] == "no weights have come in this sync"


def test_cuts_of_two_ranks_in_each_others_place_are_found() -> None:
    models = models_of(weights(), 2)
    found = read(models[::-1]).differences(SENT)
    whole = {f"{LAYER}.mlp.gate.weight", "model.norm.weight"}
    assert {text.partition(":")[0] for text in found} == set(SHAPES) - whole


def test_a_weight_of_which_a_rank_cannot_read_its_part_is_told_as_not_proved() -> None:
    models, packed = models_of(weights(), 2), f"{LAYER}.self_attn.o_proj"
    models[1].get_submodule(packed).weight = nn.Parameter(torch.zeros(0))
    held = read(models)
    assert held.unread == (f"{packed}.weight",)
    assert held.differences(SENT) == []


def test_a_cut_that_ends_within_a_word_is_told_as_not_proved() -> None:
    spec = WeightSpec(name=f"{LAYER}.self_attn.o_proj.weight", dtype="bfloat16", shape=(4, 6))
    model = model_of({spec.name: torch.zeros(4, 3, dtype=torch.bfloat16)})
    held = ReadBack(model, [spec], EngineRank(rank=1, size=2)).finish()
    assert held.unread == (spec.name,)
