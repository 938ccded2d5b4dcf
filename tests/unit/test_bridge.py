"""Which bridge is opened for a model, and what is refused before anything is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import ModelError
from rl_safe_workers.models import bridge
from rl_safe_workers.models.bridge import open_bridge
from rl_safe_workers.models.hf_directory import check_mtp_source
from rl_safe_workers.models.hf_reader import HfReader, mtp_weights
from rl_safe_workers.models.seeded import Family, create_seeded_model


def model_of_type(path: Path, model_type: str) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return str(path)


def test_a_model_without_mapping_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    message = "model type 'gpt2': mbridge has no mapping for gpt2; Megatron-Bridge .*; the supported ones are llama, "
    with pytest.raises(ModelError, match=message):
        open_bridge(model_of_type(tmp_path / "m", "gpt2"), dtype=torch.float32, transformer_engine=False)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (Family.GLM4_MOE, {"norm_topk_prob": False}, "norm_topk_prob=False with num_experts_per_tok=2"),
        (Family.GLM4_MOE, {"num_experts_per_tok": 1}, "norm_topk_prob=True with num_experts_per_tok=1"),
        (Family.DEEPSEEK_V3, {"n_group": 4, "topk_group": 2}, "num_experts_per_tok=2 with topk_group=2"),
        (Family.DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave=false is not supported"),
    ],
)
def test_a_setting_that_megatron_would_compute_otherwise_is_refused(
    family: Family, settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mbridge.core.parallel_states import ParallelStates

    monkeypatch.setattr(ParallelStates, "get_parallel_state", classmethod(lambda cls: cls()))
    create_seeded_model(tmp_path / "m", SeededModelConfig(num_hidden_layers=1), family=family, settings=settings)
    with pytest.raises(ModelError, match=message):
        open_bridge(str(tmp_path / "m"), dtype=torch.float32, transformer_engine=False)


@pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")  # of a default of megatron-core's
def test_names_are_mapped_even_if_mbridge_asks_for_instances_of_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with megatron-core 0.20, whose FullyShardedDataParallel is a function."""
    from mbridge.core import util
    from mbridge.core.parallel_states import ParallelStates

    monkeypatch.setattr(ParallelStates, "get_parallel_state", classmethod(lambda cls: cls()))
    monkeypatch.setattr(util.unwrap_model, "__defaults__", ((lambda: None),))
    create_seeded_model(tmp_path / "m", SeededModelConfig(num_hidden_layers=1))
    opened: Any = open_bridge(str(tmp_path / "m"), dtype=torch.float32, transformer_engine=False)
    model = torch.nn.Module()
    model.output_layer = torch.nn.Linear(1, 1, bias=False)
    assert opened._weight_name_mapping_mcore_local_to_global(model) == {"output_layer.weight": "output_layer.weight"}
    assert opened._views([model])[0].state_dict().keys() == {"output_layer.weight"}


def without(library: str) -> Any:
    return lambda *_: f"{library} is not there"


@pytest.mark.parametrize("library", ["mbridge", "megatron_bridge"])
def test_the_chosen_library_alone_is_asked(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, infos_of: Callable[[ModuleType], list[str]]
) -> None:
    opened = object()
    libraries = {name: without(name) for name in ("mbridge", "megatron_bridge")}
    monkeypatch.setattr(bridge, "_LIBRARIES", {**libraries, library: lambda *_: opened})
    path, options = model_of_type(tmp_path / "m", "llama"), {"dtype": torch.float32, "transformer_engine": False}
    logged = infos_of(bridge)
    assert open_bridge(path, library=library, **options) is opened  # type: ignore[arg-type]
    assert [text.split(": ")[2] for text in logged] == [f"model.bridge is {library}"]
    (other,) = libraries.keys() - {library}
    with pytest.raises(ModelError, match=f"'llama': model.bridge is {other}; {other} is not there; the supported ones"):
        open_bridge(path, library=other, **options)  # type: ignore[arg-type]


def test_megatron_bridge_is_taken_where_mbridge_has_no_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, infos_of: Callable[[ModuleType], list[str]]
) -> None:
    opened = object()
    monkeypatch.setitem(bridge._LIBRARIES, "megatron_bridge", lambda *_: opened)
    path = model_of_type(tmp_path / "m", "olmoe")
    logged = infos_of(bridge)
    assert open_bridge(path, dtype=torch.float32, transformer_engine=False) is opened
    (text,) = logged
    assert text.startswith("bridge: megatron_bridge ")
    assert text.endswith(": mbridge has no mapping for olmoe")


def test_weights_are_found_with_and_without_an_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3).bfloat16()}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    for _ in range(2):
        reader = HfReader(tmp_path)
        assert torch.equal(reader.load_some_hf_weight(["a"])["a"], torch.ones(2))
        assert reader.dtypes() == {"a": torch.float32, "b": torch.bfloat16}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))


def mtp_model(path: Path, **settings: Any) -> Path:
    """A directory with two layers and whatever follows them."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, **settings}))
    names = ("model.layers.1.a", "model.layers.2.b", "model.layers.2.shared_head.norm", "model.layers.20.c", "lm_head")
    save_file({name: torch.full((2,), float(i)) for i, name in enumerate(names)}, path / "model.safetensors")
    return path


def test_the_layers_after_the_last_are_mtp_layers(tmp_path: Path) -> None:
    path = mtp_model(tmp_path / "m", num_nextn_predict_layers=1)
    found = {name: weight.tolist() for name, weight in mtp_weights(path)}
    assert found == {"model.layers.2.b": [1.0, 1.0], "model.layers.2.shared_head.norm": [2.0, 2.0]}
    check_mtp_source(path)


def test_a_model_without_mtp_layers_has_no_such_weights(tmp_path: Path) -> None:
    path = mtp_model(tmp_path / "m")
    assert list(mtp_weights(path)) == []
    (path / "model.safetensors").unlink()
    check_mtp_source(path)


def test_an_export_that_would_lose_the_mtp_layers_is_refused(tmp_path: Path) -> None:
    path = mtp_model(tmp_path / "m", num_nextn_predict_layers=1)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="m has no weights, and the export needs those of the model's MTP layers"):
        check_mtp_source(path)


@pytest.mark.parametrize("count", [-1, 1.5, "1", True])
def test_a_malformed_number_of_mtp_layers_is_refused(count: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="config.json has num_nextn_predict_layers="):
        check_mtp_source(mtp_model(tmp_path / "m", num_nextn_predict_layers=count))


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    with pytest.raises(ModelError, match="has no weight lm_head.weight"):
        HfReader(tmp_path).load_one_hf_weight("lm_head.weight")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match=r"one.safetensors cannot be read: .*; download the model again"):
        HfReader(tmp_path)


def test_the_dtype_of_a_scalar_is_read(tmp_path: Path) -> None:
    weights = {"scale": torch.tensor(2.0, dtype=torch.bfloat16), "weight": torch.zeros(2, 3)}
    save_file(weights, tmp_path / "model.safetensors")
    assert HfReader(tmp_path).dtypes() == {"scale": torch.bfloat16, "weight": torch.float32}
