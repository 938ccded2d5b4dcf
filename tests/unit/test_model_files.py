"""Model folders that are damaged or made to do harm: one line each, and nothing outside them is read."""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rl_safe_workers.errors import ModelError
from rl_safe_workers.model_files import read_header, read_model_json, read_weight_map, stop_token_ids
from rl_safe_workers.models.hf_directory import check_tokenizer, read_hf_directory
from tests.weights import shapes_of, write_header, write_weights

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "hidden_size": 64,
    "head_dim": 32,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that is taken."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    write_weights(folder / "model.safetensors", shapes_of(CONFIG))
    read_hf_directory(folder)
    check_tokenizer(folder)
    return folder


def refusal(act: Callable[..., object], *arguments: Any) -> str:
    began = time.process_time()
    with pytest.raises(ModelError) as caught:
        act(*arguments)
    assert time.process_time() - began < 4
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1_000
    return str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        *({"num_experts": value} for value in (-1, 0, "8", None, 8.0, True, [8], {"a": 1}, 10**12, 10**400, math.nan)),
        *({"hidden_size": value} for value in (1e12, 10**12, "64", math.inf, -64, None)),
        *({"tie_word_embeddings": value} for value in ("false", 0, [])),
        *({"rms_norm_eps": value} for value in ("x", math.nan, math.inf, -1, [], 10**400)),
        *({"model_type": value} for value in (None, 3, ["qwen3"], {}, "x" * 10**6, "../qwen3")),
        *({"head_dim": value} for value in (-1, "32", 2.5)),
        *({"rope_scaling": value} for value in ("x" * 10**6, 3, {"rope_type": ["default"]}, {"rope_type": {}})),
        {"vocab_size": 256},
        {"hidden_size": 128},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 2**31 - 1},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_hostile_configuration_is_refused(model: Path, change: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | change))
    refusal(read_hf_directory, model)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "NaN",
        '"' + "x" * 2**20 + '"',
        "[" * 10**5,
        '{"a":' * 51 + "1" + "}" * 51,
        '{"a":' * 1_000 + "1" + "}" * 1_000,
        '{"num_experts": ' + "9" * 5_000 + "}",
        "\ufeff{}",
        "{}\0",
    ],
    ids=lambda text: text[:10],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_that_is_no_settings_is_refused(model: Path, name: str, text: str) -> None:
    (model / name).write_text(text, encoding="utf-8")
    assert str(model / name) in refusal(lambda: (read_hf_directory(model), check_tokenizer(model)))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "x.safetensors", "x"]
)
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_file_that_is_none_is_refused_without_waiting(model: Path, name: str, kind: str) -> None:
    (model / name).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(model / name)
    else:
        (model / name).symlink_to("/dev/zero")
    assert "is not a regular file" in refusal(read_hf_directory, model)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"]
)
def test_a_file_of_a_gibibyte_is_refused(model: Path, name: str) -> None:
    with (model / name).open("wb") as file:
        file.truncate(2**30)
    refusal(lambda: (read_hf_directory(model), check_tokenizer(model)))


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "a/x.safetensors", "", ".", "..", 3, None, [], "x.bin"]
)
def test_an_index_names_files_of_its_folder_alone(model: Path, file: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    assert "no safetensors file of this folder" in refusal(read_weight_map, model)
    assert "no safetensors file of this folder" in refusal(read_hf_directory, model)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 3])
def test_an_index_without_a_weight_map_is_refused(model: Path, weight_map: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "has no weight_map" in refusal(read_weight_map, model)


def test_an_index_that_its_files_do_not_bear_out_is_refused(model: Path) -> None:
    weight_map = dict.fromkeys([*shapes_of(CONFIG), "more"], "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "lacks weight more" in refusal(read_hf_directory, model)


def test_one_weight_in_two_files_is_refused(model: Path) -> None:
    write_weights(model / "other.safetensors", {"model.embed_tokens.weight": (128, 64)})
    assert "and so has another file" in refusal(read_hf_directory, model)


def test_links_of_a_model_folder_are_followed(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(tmp_path / "blob")
    (model / "model.safetensors").symlink_to("../blob")
    assert read_hf_directory(model).num_layers == 2
    (tmp_path / "blob").unlink()
    assert "No such file" in refusal(read_hf_directory, model)


HEADERS: dict[str, tuple[object, int]] = {
    "beyond the file": ({"a": F32}, 4),
    "less than the file": ({"a": F32}, 12),
    "overlap": ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, 12),
    "hole": ({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, 20),
    "backwards": ({"a": {**F32, "data_offsets": [8, 0]}}, 8),
    "negative": ({"a": {**F32, "data_offsets": [-8, 0]}}, 8),
    "huge offsets": ({"a": {**F32, "data_offsets": [0, 2**64]}}, 8),
    "shape that overflows": ({"a": {**F32, "shape": [2**62, 2**62, 4]}}, 8),
    "shape that wraps around": ({"a": {**F32, "shape": [2**32, 2**32, 2]}}, 8),
    "negative shape": ({"a": {**F32, "shape": [-1, -2]}}, 8),
    "shape of text": ({"a": {**F32, "shape": ["2"]}}, 8),
    "shape of many": ({"a": {**F32, "shape": [1] * 10**6}}, 8),
    "true": ({"a": {**F32, "shape": [True, 2]}}, 8),
    "unknown dtype": ({"a": {**F32, "dtype": "PICKLE"}}, 8),
    "dtype of a list": ({"a": {**F32, "dtype": ["F32"]}}, 8),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8),
    "three offsets": ({"a": {**F32, "data_offsets": [0, 4, 8]}}, 8),
    "no entry": ({"a": 3}, 8),
    "list": ([F32], 8),
    "text": ("x", 8),
    "nothing": ({}, 8),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_hostile_header_is_refused(tmp_path: Path, case: str) -> None:
    write_header(tmp_path / "x.safetensors", *HEADERS[case])
    assert "cannot be read as safetensors" in refusal(read_header, tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 0),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2) + b"\xff\xfe",
        struct.pack("<Q", 2**20) + b"[" * 2**20,
        struct.pack("<Q", 2**20) + b'{"a":' * (2**20 // 5) + b" ",
        struct.pack("<Q", 142) + b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2) + bytes(8),
    ],
    ids=["empty", "short", "no header", "2**63", "2**64", "cut off", "no UTF-8", "deep", "deep maps", "a name twice"],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    assert "cannot be read as safetensors" in refusal(read_header, tmp_path / "x.safetensors")
    with pytest.raises(SafetensorError):
        safe_open(tmp_path / "x.safetensors", framework="np")


def test_a_header_is_read_as_the_library_writes_it(tmp_path: Path) -> None:
    import numpy as np

    arrays = {"b": np.zeros((2, 3), np.float16), "a": np.ones(5, np.int64), "empty": np.zeros((0, 4), np.float32)}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    entries = read_header(tmp_path / "x.safetensors")
    assert {name: (entry.dtype, entry.shape) for name, entry in entries.items()} == {
        "b": ("F16", (2, 3)),
        "a": ("I64", (5,)),
        "empty": ("F32", (0, 4)),
    }


@pytest.mark.parametrize("ids", ["2", 2.0, True, -1, 2**31, [[1]], ["1"], [None], {"a": 1}, [1] * 1_001])
def test_stop_tokens_that_are_no_ids_are_refused(model: Path, ids: object) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert "eos_token_id cannot be" in refusal(stop_token_ids, model)


def test_stop_tokens_of_both_files_are_joined(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0]}))
    (model / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 3}))
    assert stop_token_ids(model) == [0, 3, 7]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert stop_token_ids(model) == [3]


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_a_folder_of_no_possible_name_is_refused(name: str) -> None:
    refusal(read_model_json, Path(name, "config.json"))
