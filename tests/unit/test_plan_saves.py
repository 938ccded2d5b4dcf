"""Parameters from config.json, and what each rank writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.errors import ModelError
from rl_safe_workers.plan.model import ModelSize, split_layers
from rl_safe_workers.plan.saves import GIB, OPTIMIZER_BYTES, OURS, SaveWay, plan_saves
from rl_safe_workers.topology.layout import ParallelLayout

QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
MIXTRAL = LLAMA_8B | {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


@pytest.mark.parametrize(
    ("config", "billions"),
    [(QWEN3_30B, 30.5), (QWEN3_235B, 235.1), (LLAMA_8B, 8.03), (MIXTRAL, 46.7), (DEEPSEEK_V3, 671)],
    ids=["qwen3-30b", "qwen3-235b", "llama-8b", "mixtral", "deepseek-v3"],
)
def test_parameters_are_those_that_the_models_are_known_for(config: dict[str, Any], billions: float) -> None:
    assert ModelSize.of(config).total / 1e9 == pytest.approx(billions, rel=0.005)


def test_the_text_part_of_a_larger_config_is_read() -> None:
    assert ModelSize.of({"model_type": "vlm", "text_config": LLAMA_8B}).total == ModelSize.of(LLAMA_8B).total


def test_stages_together_have_the_model() -> None:
    model = ModelSize.of(DEEPSEEK_V3)
    stages = model.stages(split_layers(61, 8, first=None, last=5))
    assert sum(stage.total for stage in stages) == model.total
    assert stages[0].experts < stages[1].experts  # three dense layers


def test_layers_go_to_the_stages_as_even_as_can_be() -> None:
    assert split_layers(48, 4, first=None, last=None) == [12, 12, 12, 12]
    assert split_layers(61, 4, first=None, last=13) == [16, 16, 16, 13]
    assert split_layers(7, 2, first=3, last=None) == [3, 4]
    assert split_layers(7, 4, first=None, last=None, embedding=True) == [1, 2, 2, 2]
    assert split_layers(2, 4, first=None, last=None, embedding=True, loss=True) == [0, 1, 1, 0]


def saves(
    world_size: int = 32, *, instances: int = 1, raises: bool = True, **sizes: int
) -> dict[tuple[str, bool], SaveWay]:
    ones = {"tensor": 1, "pipeline": 1, "expert": 1, "expert_tensor": 1, "context": 1}
    layout = ParallelLayout(world_size=world_size, **{**ones, **sizes})
    found = plan_saves(
        layout,
        ModelSize.of(QWEN3_30B).stages(split_layers(48, layout.pipeline, first=None, last=None)),
        instances=instances,
        weight_bytes=2,
        nodes=[rank // 8 for rank in range(layout.world_size)],
        node_bytes_s=GIB,
        raises=raises,
    )
    return {(way.sharding, way.fully_parallel): way for way in found}


def gigabytes(way: SaveWay, *ranks: int) -> list[float]:
    return [round(way.bytes_by_rank[rank] / 1e9, 1) for rank in ranks]


def test_replica_zero_writes_all_without_the_fully_parallel_wrapper() -> None:
    way = saves(expert=8)["fully_reshardable", False]
    # 10.3 and 7.2 of weights, 62 and 43.5 of optimizer; ranks 8 to 31 nothing.
    assert gigabytes(way, 0, 1, 7, 8, 31) == [72.3, 50.7, 50.7, 0.0, 0.0]
    assert way.writers == 8


def test_dp_reshardable_writes_each_ranks_own_part_of_the_optimizer() -> None:
    way = saves(expert=8)["dp_reshardable", False]
    assert gigabytes(way, 0, 1, 8, 31) == [21.8, 18.7, 11.4, 11.4]
    assert way.writers == 32


@pytest.mark.parametrize("sharding", ["dp_reshardable", "fully_reshardable"])
def test_the_fully_parallel_wrapper_and_ours_write_evenly(sharding: str) -> None:
    found = saves(expert=8)
    for way in (found[sharding, True], found[OURS, False]):
        assert way.most * 32 == pytest.approx(way.total, rel=0.001)


@pytest.mark.parametrize(
    "sizes", [{"expert": 8}, {"tensor": 4, "pipeline": 2, "expert": 4}, {"context": 2, "expert": 4}]
)
def test_every_way_writes_the_whole_state_once(sizes: dict[str, int]) -> None:
    whole = ModelSize.of(QWEN3_30B).total * (2 + OPTIMIZER_BYTES)
    for key, way in saves(**sizes, raises=False).items():
        # Parts that each tensor-parallel rank keeps for itself, norms and routers, are there once for each.
        assert way.total == pytest.approx(whole, rel=0.002), key


def test_only_the_first_optimizer_instance_saves() -> None:
    way = saves(expert=4, instances=2)["dp_reshardable", True]
    assert gigabytes(way, 0)[0] > gigabytes(way, 31)[0] > 0
    assert way.total == pytest.approx(saves(expert=4)["dp_reshardable", True].total, rel=0.001)


def test_a_sharding_that_raises_writes_nothing() -> None:
    assert saves()["fully_sharded_model_space", False].bytes_by_rank == ()


def test_seconds_are_those_of_the_node_that_writes_most() -> None:
    way = saves(expert=8)["fully_reshardable", False]
    assert way.seconds == pytest.approx(sum(way.bytes_by_rank[:8]) / GIB)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hidden_size": None}, "config.json has no hidden_size: it takes a whole number"),
        ({"num_hidden_layers": -3}, "num_hidden_layers=-3: it takes a whole number from 0"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"num_experts": True}, "num_experts=True"),
        ({"intermediate_size": 1.5}, "intermediate_size=1.5"),
    ],
)
def test_a_size_that_cannot_be_is_named(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        ModelSize.of(QWEN3_30B | change)


@pytest.mark.parametrize("text", ["", "[1]", "{", '"x"'])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="it takes a"):
        ModelSize.read(tmp_path)


def test_a_directory_and_its_file_are_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert ModelSize.read(tmp_path) == ModelSize.read(tmp_path / "config.json")
    with pytest.raises(ModelError, match="does not exist"):
        ModelSize.read(tmp_path / "other")
