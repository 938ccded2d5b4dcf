"""What a place holds before a conversion: nothing, the result, a torn one, or something of someone else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint import publish
from rl_safe_workers.checkpoint.convert import (
    ConvertedModel,
    find_conversion,
    find_megatron_weights,
    own_hf_files,
    publish_conversion,
)
from rl_safe_workers.checkpoint.manifest import MANIFEST, SHARDS
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError

MODEL = ConvertedModel(fingerprint="f" * 16, dtype="bfloat16")
SHARD = f"{SHARDS}/__0_0.distcp"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A complete conversion."""
    return make(tmp_path / "out")


def make(final: Path, model: ConvertedModel = MODEL) -> Path:
    pending = publish.start_pending(final)
    (pending / SHARDS).mkdir()
    (pending / SHARD).write_bytes(b"weights")
    publish_conversion(
        pending, final, model, layout={"world_size": 2}, files={SHARD: {"bytes": 7, "digest": "crc32:0"}}
    )
    return final


def test_nothing_is_there_at_first(tmp_path: Path) -> None:
    assert find_conversion(tmp_path / "out", MODEL) is None
    (tmp_path / "out").mkdir()
    assert find_conversion(tmp_path / "out", MODEL) is None


def test_a_complete_one_is_found_and_stands_alone(place: Path) -> None:
    manifest = find_conversion(place, MODEL)
    assert manifest is not None
    assert manifest.layout == {"world_size": 2}
    assert [path.name for path in place.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("damage", ["truncated", "shard gone", "manifest gone", "manifest torn"])
def test_a_torn_one_is_made_again(place: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    if damage == "truncated":
        (place / SHARD).write_bytes(b"weight")
    elif damage == "shard gone":
        (place / SHARD).unlink()
    elif damage == "manifest gone":
        (place / MANIFEST).unlink()
    else:
        (place / MANIFEST).write_text((place / MANIFEST).read_text()[:-40])
    assert find_conversion(place, MODEL) is None
    assert "the conversion is made again" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (ConvertedModel(fingerprint="0" * 16, dtype="bfloat16"), "another model .fingerprint ffffffffffffffff"),
        (ConvertedModel(fingerprint="f" * 16, dtype="float32"), "in bfloat16, this one has .* in float32"),
    ],
)
def test_one_of_another_model_is_refused_whether_complete_or_not(
    place: Path, wanted: ConvertedModel, message: str
) -> None:
    for _ in range(2):
        with pytest.raises(CheckpointMismatchError, match=message):
            find_conversion(place, wanted)
        assert find_conversion(place, wanted, overwrite=True) is None
        (place / SHARD).unlink(missing_ok=True)


def test_files_of_someone_else_are_refused(place: Path) -> None:
    (place / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointMismatchError, match=r"holds notes.txt, which no conversion writes"):
        find_conversion(place, MODEL)


def test_a_training_checkpoint_is_refused(place: Path) -> None:
    fields = json.loads((place / MANIFEST).read_text())
    (place / MANIFEST).write_text(json.dumps({**fields, "driver_state": {"data": {}}}))
    with pytest.raises(CheckpointMismatchError, match="is a checkpoint of a training run"):
        find_conversion(place, MODEL)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(CheckpointMismatchError, match="is not a directory"):
        find_conversion(tmp_path / "out", MODEL)


def test_a_new_conversion_takes_the_place_of_an_older_one(place: Path) -> None:
    other = ConvertedModel(fingerprint="0" * 16, dtype="float32")
    make(place, other)
    assert find_conversion(place, other) is not None
    assert [path.name for path in place.parent.iterdir()] == ["out"]


def test_the_older_one_stays_if_the_new_one_cannot_be_renamed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path == publish.pending_path(place):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output error"):
        make(place, ConvertedModel(fingerprint="0" * 16, dtype="float32"))
    assert find_conversion(place, MODEL) is not None


def test_shards_are_found_in_a_checkpoint_and_in_another_programs_directory(place: Path, tmp_path: Path) -> None:
    assert find_megatron_weights(place).shards == place / SHARDS
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "metadata.json").write_text("{}")
    theirs = find_megatron_weights(tmp_path / "theirs")
    assert (theirs.shards, theirs.manifest) == (tmp_path / "theirs", None)


def test_a_checkpoint_without_manifest_is_refused(place: Path) -> None:
    (place / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        find_megatron_weights(place)


def test_a_checkpoints_own_hf_files_may_not_be_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint" / "huggingface"
    assert own_hf_files(folder.parent) is None
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "near.json").symlink_to("config.json")
    assert own_hf_files(folder.parent) == folder
    (folder / "tokenizer.json").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is a link that leads out of the checkpoint"):
        own_hf_files(folder.parent)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        own_hf_files(folder.parent)
