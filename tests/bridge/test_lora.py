"""Checkpoints of models with adapters of Megatron-Bridge: every bit of base, adapters and moments comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_safe_workers.checkpoint.audit import audit
from rl_safe_workers.checkpoint.format.index import read_index
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from tests.distributed.laid_out_rank import assert_equal, whole
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import served_store

Ranks = list[dict[str, Any]]

ITERATION = "iter_0000002"


def _in_ranks(what: str, model: Path, root: Path, layout: str) -> Ranks:
    return values(run_ranks(_call, 4, what, model, root, "lora", layout, timeout_s=280))


def _call(rank: int, what: str, *args: Any) -> dict[str, Any]:
    """Imports the library in the rank alone: here its warnings would be errors."""
    from tests.bridge import lora

    return getattr(lora, what)(rank, *args)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 48 and 20 elements, which no data-parallel boundary respects."""
    path = tmp_path_factory.mktemp("lora") / "model"
    create_seeded_model(path, SeededModelConfig(hidden_size=48, head_dim=12, moe_intermediate_size=20))
    return path


@pytest.fixture(scope="module", params=["ep2", "tp2_ep2", "pp2_ep2"])
def saved(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ranks]:
    """A folder with the checkpoints of a layout, and what came back from them on each rank."""
    root = tmp_path_factory.mktemp(request.param)
    return root, _in_ranks("save_and_load", model, root, request.param)


def _of(ranks: Ranks, name: str) -> list[Any]:
    return [rank[name] for rank in ranks]


def test_training_moves_adapters_alone(saved: tuple[Path, Ranks]) -> None:
    _, ranks = saved
    assert _of(ranks, "base") == _of(ranks, "base trained")
    tensors = whole(_of(ranks, "saved"))
    adapters = {key for key in tensors if ".adapter." in key and not key.startswith("optimizer.")}
    assert {key.partition(".adapter.")[0].rpartition(".")[2] for key in adapters} == {
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
    }
    for state in ("param", "exp_avg", "exp_avg_sq"):
        prefix = f"optimizer.state.{state}."
        moved = {key.removeprefix(prefix) for key, value in tensors.items() if key.startswith(prefix) and value.any()}
        assert moved == adapters


@pytest.mark.parametrize("name", ["loaded", "elsewhere", "described elsewhere", "stock by ours"])
def test_every_element_comes_back(saved: tuple[Path, Ranks], name: str) -> None:
    _, ranks = saved
    assert_equal(_of(ranks, name), _of(ranks, "saved"))


def test_the_base_comes_back_from_the_checkpoint(saved: tuple[Path, Ranks]) -> None:
    _, ranks = saved
    assert _of(ranks, "base loaded") == _of(ranks, "base")


@pytest.mark.parametrize("name", ["by stock", "by stock elsewhere"])
def test_megatron_reads_the_same_values(saved: tuple[Path, Ranks], name: str) -> None:
    _, ranks = saved
    assert _of(ranks, name) == [[]] * 4


def test_the_step_after_a_load_is_the_same(saved: tuple[Path, Ranks]) -> None:
    _, ranks = saved
    metrics, held = zip(*_of(ranks, "after"), strict=True)
    metrics_loaded, held_loaded = zip(*_of(ranks, "after the load"), strict=True)
    assert metrics_loaded == metrics
    assert_equal(held_loaded, held, steps=3)


@pytest.mark.parametrize("name", ["exported again", "exported elsewhere", "exported from weights alone"])
def test_bridge_exports_the_same_merged_weights_and_adapters(saved: tuple[Path, Ranks], name: str) -> None:
    _, (first, *_) = saved
    expected, found = first["exported"], first[name]
    assert {key.partition(" ")[0] for key in expected} == {"merged", "adapter"}
    assert found.keys() == expected.keys()
    assert [key for key in found if not np.array_equal(found[key], expected[key])] == []


@pytest.mark.parametrize("name", ["ours", "stock"])
def test_the_audit_finds_each_checkpoint_whole(saved: tuple[Path, Ranks], name: str) -> None:
    root, _ = saved
    assert audit(root / name, deep=True).problems == ()


@pytest.fixture(scope="module", params=["ep2", "pp2_ep2"])
def bridges(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Ranks]:
    """A folder with the checkpoints of adapters alone that Bridge saved, and what it loaded of them."""
    root = tmp_path_factory.mktemp(f"bridge_{request.param}")
    return root, _in_ranks("exchange_with_bridge", model, root, request.param)


@pytest.mark.parametrize("name", ["ours", "stock"])
def test_bridge_loads_the_adapters_that_it_saved(bridges: tuple[Path, Ranks], name: str) -> None:
    _, ranks = bridges
    assert _of(ranks, f"step of {name}") == [2] * 4
    assert_equal(_of(ranks, name), _of(ranks, "saved"))
    expected, found = ranks[0]["exported"], ranks[0][f"exported {name}"]
    assert [key for key in expected if not np.array_equal(found[key], expected[key])] == []


def test_a_checkpoint_of_bridge_has_adapters_alone(bridges: tuple[Path, Ranks]) -> None:
    root, _ = bridges
    ours, stock = (read_index(root / name / ITERATION) for name in ("ours", "stock"))
    assert ours.tensors.keys() == stock.tensors.keys()
    # Several optimizers are chained_0.optimizer, chained_1.optimizer.
    of_model = [key for key in ours.tensors if "optimizer." not in key]
    assert of_model
    assert [key for key in of_model if ".adapter." not in key] == []
    assert {key: entry.shape for key, entry in ours.tensors.items()} == {
        key: entry.shape for key, entry in stock.tensors.items()
    }


@pytest.mark.parametrize("name", ["ours", "stock"])
def test_the_audit_finds_adapters_alone_whole(bridges: tuple[Path, Ranks], name: str) -> None:
    root, _ = bridges
    assert audit(root / name / ITERATION, deep=True).problems == ()


def test_a_load_of_the_whole_model_names_the_weights_that_adapters_alone_lack(bridges: tuple[Path, Ranks]) -> None:
    _, ranks = bridges
    for said in _of(ranks, "refused"):
        assert "the checkpoint does not fit the model: missing: decoder" in said


REFUSED = (
    "was saved under {'tensor': 2} and cannot be loaded under {'tensor': 1}: the order of the rows of "
    "decoder.layers.0.mlp.linear_fc1.adapter.adapter_"
)


@pytest.mark.parametrize(("adapters", "refused"), [("lora", ""), ("canonical", REFUSED)])
def test_the_mixin_loads_what_it_saved_and_refuses_adapters_under_another_layout(
    adapters: str, refused: str, tmp_path: Path
) -> None:
    create_seeded_model(tmp_path / "model", SeededModelConfig(num_experts=0))
    with served_store() as address:
        arguments = address, tmp_path / "model", tmp_path / "checkpoints", adapters
        ranks = values(run_ranks(_call, 2, "save_with_the_mixin", *arguments, timeout_s=280))
    for rank in ranks:
        assert rank["loaded"] == rank["saved"] != rank["moved"]
        assert refused in rank["refused"]
        assert bool(refused) == bool(rank["refused"])
    assert audit(tmp_path / "checkpoints" / "global_step_1", deep=True).problems == ()
