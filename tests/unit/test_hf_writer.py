"""The streaming safetensors writer: what readers make of its files, what stays in memory, and what failures leave."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_safe_workers.checkpoint.folders.publish import start_pending
from rl_safe_workers.checkpoint.save import hf_writer
from rl_safe_workers.checkpoint.save.hf_writer import HfWeightsWriter, write_hf_directory
from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.models.hf_reader import HfReader
from rl_safe_workers.models.seeded import create_seeded_model

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe"
    create_seeded_model(path, SeededModelConfig(), dtype="bfloat16")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.mkdir()
    return path


def write(folder: Path, weights: Weights, **options: int) -> None:
    with HfWeightsWriter(folder, **options) as writer:
        for name, tensor in weights.items():
            writer.add(name, tensor)
        writer.finish()


def read(folder: Path) -> Weights:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_equal(got: Weights, expected: Weights) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert torch.equal(got[name], tensor)


ODD = {
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "odd bytes": torch.arange(7, dtype=torch.uint8),
    "after odd bytes": torch.randn(3, 5),
    "half": torch.randn(5).bfloat16(),
    "wide after half": torch.arange(4, dtype=torch.int64),
    "transposed": torch.randn(4, 6).t(),
    "part of a larger one": torch.randn(10, 4)[3:5],
    'quotes " and ü': torch.ones(2, dtype=torch.bool),
}


def test_tensors_of_any_shape_dtype_and_stride_are_read_back(folder: Path) -> None:
    write(folder, ODD)
    assert_equal(read(folder), ODD)


def test_one_file_needs_no_index(folder: Path) -> None:
    write(folder, {"a": torch.ones(3)})
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def test_the_header_is_what_the_format_asks_for(folder: Path) -> None:
    write(folder, {"a": torch.ones(3), "b": torch.ones(2)}, header_bytes=1024)
    data = (folder / "model.safetensors").read_bytes()
    header = data[8 : 8 + 1024]
    assert int.from_bytes(data[:8], "little") == 1024
    assert header.startswith(b"{")
    assert set(header[header.rindex(b"}") + 1 :]) == {0x20}
    assert json.loads(header)["b"] == {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}
    assert len(data) == 8 + 1024 + 20


def test_files_are_as_large_as_allowed_and_the_index_finds_every_tensor(folder: Path) -> None:
    weights = {f"w{i}": torch.randn(size) for i, size in enumerate([10, 10, 10, 100, 5])}
    write(folder, weights, max_shard_bytes=80)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 135
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), weights[name])
    assert [len(load_file(folder / file)) for file in files] == [2, 1, 1, 1]


def test_a_full_header_begins_the_next_file(folder: Path) -> None:
    weights = {f"layer.{i}.weight": torch.full((2,), float(i)) for i in range(40)}
    write(folder, weights, header_bytes=512)
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert_equal(read(folder), weights)


def test_a_name_longer_than_a_header_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="longer than the 64 bytes"):
        write(folder, {"n" * 100: torch.ones(1)}, header_bytes=64)


def test_a_name_that_comes_twice_is_refused(folder: Path) -> None:
    with HfWeightsWriter(folder) as writer:
        writer.add("w", torch.ones(1))
        with pytest.raises(CheckpointError, match="yields w twice"):
            writer.add("w", torch.ones(1))


def test_writing_a_live_parameter_leaves_its_storage_resizable(folder: Path) -> None:
    parameter = torch.ones(8)
    write(folder, {"w": parameter[2:6]})
    parameter.untyped_storage().resize_(0)
    assert torch.equal(read(folder)["w"], torch.ones(4))


def exported(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """As a training run has them: in fp32."""
    for name, tensor in load_file(source / "model.safetensors").items():
        yield name, tensor.float()


def export(
    final: Path, source: Path, weights: Iterator[tuple[str, torch.Tensor]] | None = None, **options: int
) -> None:
    write_hf_directory(final, weights or exported(source), source=source, dtypes=HfReader(source).dtypes(), **options)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 10**5], ids=["one file", "many files"])
def test_transformers_loads_an_export_as_it_loads_the_source(
    source: Path, tmp_path: Path, max_shard_bytes: int
) -> None:
    export(tmp_path / "out", source, max_shard_bytes=max_shard_bytes)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert_equal(ours, AutoModelForCausalLM.from_pretrained(source, dtype="auto").state_dict())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("abc") == AutoTokenizer.from_pretrained(source)("abc")


def test_an_export_is_in_the_dtype_of_the_source(source: Path, tmp_path: Path) -> None:
    export(tmp_path / "out", source)
    assert_equal(read(tmp_path / "out"), load_file(source / "model.safetensors"))
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_another_dtype_may_be_asked_for_and_config_json_says_so(source: Path, tmp_path: Path) -> None:
    write_hf_directory(tmp_path / "out", exported(source), source=source, dtypes={}, dtype=torch.float32)
    assert_equal(read(tmp_path / "out"), dict(exported(source)))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_no_earlier_tensor_is_kept(source: Path, tmp_path: Path) -> None:
    alive: list[int] = []
    born: list[weakref.ref[torch.Tensor]] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(20):
            alive.append(sum(reference() is not None for reference in born))
            tensor = torch.randn(1000)
            born.append(weakref.ref(tensor))
            yield f"w{number}", tensor
            del tensor

    export(tmp_path / "out", source, weights())
    assert alive == [0] * 20


def failing(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield "w", torch.ones(3)
    raise RuntimeError("a rank has died")


def test_a_failing_export_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a rank has died"):
        export(tmp_path / "out", source, failing(source))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def disk_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_all(file: object, tensor: torch.Tensor) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_writer, "_write_all", write_all)


@pytest.mark.usefixtures("disk_full")
def test_a_full_disk_is_one_of_our_errors_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot write the HF weights at .*No space left on device"):
        export(tmp_path / "out", source)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_export_leaves_what_it_was_to_replace(source: Path, tmp_path: Path) -> None:
    export(tmp_path / "out", source)
    with pytest.raises(RuntimeError):
        export(tmp_path / "out", source, failing(source))
    assert_equal(read(tmp_path / "out"), load_file(source / "model.safetensors"))


def test_what_an_interrupted_export_left_is_replaced(source: Path, tmp_path: Path) -> None:
    start_pending(tmp_path / "out", what="HF weights")
    (tmp_path / "out.incomplete" / "model-00001.safetensors").write_bytes(b"half")
    export(tmp_path / "out", source)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_place_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot make .*/file/out: .*; choose a writable place"):
        export(tmp_path / "file" / "out", source)
