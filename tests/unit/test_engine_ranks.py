"""Ranks of a tensor-parallel engine: their cuts of the weights together are what was sent, or the weight is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_safe_workers.rollout.cuts import EngineRank
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.read_back import ReadBack
from rl_safe_workers.rollout.sync_proof import HeldWeights
from tests.slow_digest import slow_digest

LAYER = "model.layers.0"
HEAD_DIM, KV_HEADS, VOCABULARY = 4, 2, 70
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, 16),
    f"{LAYER}.self_attn.q_proj.weight": (8 * HEAD_DIM, 16),
    f"{LAYER}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 16),
    f"{LAYER}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 16),
    f"{LAYER}.self_attn.q_proj.bias": (8 * HEAD_DIM,),
    f"{LAYER}.self_attn.k_proj.bias": (KV_HEADS * HEAD_DIM,),
    f"{LAYER}.self_attn.v_proj.bias": (KV_HEADS * HEAD_DIM,),
    f"{LAYER}.self_attn.o_proj.weight": (16, 8 * HEAD_DIM),
    f"{LAYER}.mlp.gate.weight": (2, 16),
    **{f"{LAYER}.mlp.experts.{one}.{part}_proj.weight": (24, 16) for one in range(2) for part in ("gate", "up")},
    **{f"{LAYER}.mlp.experts.{one}.down_proj.weight": (16, 24) for one in range(2)},
    "model.norm.weight": (16,),
}
Weights = dict[str, torch.Tensor]


def weights() -> Weights:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def parameters(held: Weights, rank: int, size: int) -> Weights:
    """Returns the parameters of a rank, by this test's own knowledge of vLLM."""

    def rows(name: str, parts: int = size) -> torch.Tensor:
        return held[f"{LAYER}.{name}"].chunk(parts)[rank * parts // size]

    def qkv(leaf: str) -> torch.Tensor:
        kv = min(size, KV_HEADS)
        return torch.cat([rows(f"self_attn.{part}_proj.{leaf}", kv if part != "q" else size) for part in "qkv"])

    padded = torch.cat([held["model.embed_tokens.weight"], torch.zeros(128 - VOCABULARY, 16)])
    experts = [f"mlp.experts.{one}" for one in range(2)]
    joined = [torch.cat([rows(f"{one}.gate_proj.weight"), rows(f"{one}.up_proj.weight")]) for one in experts]
    last = [held[f"{LAYER}.{one}.down_proj.weight"].chunk(size, dim=1)[rank] for one in experts]
    return {
        "model.embed_tokens.weight": padded.chunk(size)[rank],
        f"{LAYER}.self_attn.qkv_proj.weight": qkv("weight"),
        f"{LAYER}.self_attn.qkv_proj.bias": qkv("bias"),
        f"{LAYER}.self_attn.o_proj.weight": held[f"{LAYER}.self_attn.o_proj.weight"].chunk(size, dim=1)[rank],
        f"{LAYER}.mlp.gate.weight": held[f"{LAYER}.mlp.gate.weight"],
        f"{LAYER}.mlp.experts.routed_experts.w13_weight": torch.stack(joined),
        f"{LAYER}.mlp.experts.routed_experts.w2_weight": torch.stack(last),
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


def read(models: list[nn.Module]) -> HeldWeights:
    specs = [WeightSpec(name=name, dtype="float32", shape=shape) for name, shape in SHAPES.items()]
    return HeldWeights.of_engine(
        [
            ReadBack(model, specs, EngineRank(rank=rank, size=len(models), kv_heads=KV_HEADS)).finish()
            for rank, model in enumerate(models)
        ]
    )


def models_of(held: Weights, size: int) -> list[nn.Module]:
    return [model_of(parameters(held, rank, size)) for rank in range(size)]


SENT = {name: slow_digest(tensor) for name, tensor in weights().items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_weights_of_an_engine_are_proved(size: int) -> None:
    held = read(models_of(weights(), size))
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
