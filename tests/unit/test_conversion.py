"""A place before a conversion: empty, with the result, with a torn one, or with someone else's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.folders import ownership, publish
from rl_safe_workers.checkpoint.folders.conversion_folder import (
    OURS,
    ConvertedModel,
    find_conversion,
    find_megatron_weights,
    own_hf_files,
    publish_conversion,
)
from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError
from tests.unit.foreign_folders import contents

MODEL = ConvertedModel(fingerprint="f" * 16, dtype="bfloat16")
SHARD = f"{SHARDS}/__0_0.distcp"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A complete conversion."""
    return make(tmp_path / "out")


def make(final: Path, model: ConvertedModel = MODEL, *, overwrite: bool = False) -> Path:
    pending = publish.start_pending(final, what="a conversion", holds=OURS)
    (pending / SHARDS).mkdir()
    (pending / SHARD).write_bytes(b"weights")
    publish_conversion(
        pending,
        final,
        model,
        layout={"world_size": 2},
        files={SHARD: {"bytes": 7, "digest": "crc32:0"}},
        overwrite=overwrite,
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


@pytest.mark.parametrize("damage", ["truncated", "shard gone"])
def test_a_torn_one_is_made_again(place: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    if damage == "truncated":
        (place / SHARD).write_bytes(b"weight")
    else:
        (place / SHARD).unlink()
    assert find_conversion(place, MODEL) is None
    assert "the conversion is made again" in caplog.text
    assert find_conversion(make(place), MODEL) is not None


@pytest.mark.parametrize("damage", ["gone", "torn"])
def test_shards_without_a_valid_manifest_are_not_replaced(place: Path, damage: str) -> None:
    if damage == "gone":
        (place / MANIFEST).unlink()
    else:
        (place / MANIFEST).write_text((place / MANIFEST).read_text()[:-40])
    with pytest.raises(CheckpointMismatchError, match=r"out has no (valid )?manifest.json"):
        find_conversion(place, MODEL)
    with pytest.raises(CheckpointError, match=r"out has no (valid )?manifest.json"):
        make(place)
    assert (place / SHARD).read_bytes() == b"weights"
    assert find_conversion(place, MODEL, overwrite=True) is None


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
    with pytest.raises(CheckpointMismatchError, match=r"holds notes.txt, which its manifest.json does not list"):
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


def test_a_link_to_a_complete_conversion_is_used(place: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(place)
    assert find_conversion(tmp_path / "link", MODEL) is not None


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("damage", ["torn", "of another model", "gone", "notes"])
def test_nothing_behind_a_link_is_replaced(place: Path, damage: str, overwrite: bool, tmp_path: Path) -> None:
    archive = place.rename(tmp_path / "archive")
    place.symlink_to("archive")
    wanted = MODEL
    if damage == "torn":
        (archive / SHARD).write_bytes(b"")
    elif damage == "of another model":
        wanted = ConvertedModel(fingerprint="0" * 16, dtype="float32")
    elif damage == "gone":
        archive.rename(tmp_path / "moved")
    else:
        (archive / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(CheckpointMismatchError, match="out (is a link|is not a directory|holds|is a conversion)"):
        find_conversion(place, wanted, overwrite=overwrite)
    assert contents(tmp_path) == before
    pending = publish.start_pending(place, what="a conversion", holds=OURS)
    with pytest.raises(CheckpointError, match="out is a link"):
        publish.publish(pending, place, overwrite=overwrite)
    assert {path: contents(tmp_path)[path] for path in before} == before


PENDING = {
    "notes": lambda path: (path.mkdir(), (path / "notes.txt").write_text("mine")),
    "shards": lambda path: ((path / SHARDS).mkdir(parents=True), (path / SHARD).write_text("mine")),
    "file": lambda path: path.write_text("mine"),
    "link": lambda path: path.symlink_to("elsewhere"),
    "notes in ours": lambda path: (
        publish.start_pending(path.with_suffix(""), what="a conversion", holds=OURS),
        (path / "notes.txt").write_text("mine"),
    ),
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", PENDING)
def test_a_pending_folder_that_is_not_ours_is_refused_and_stays(kind: str, overwrite: bool, tmp_path: Path) -> None:
    PENDING[kind](tmp_path / "out.incomplete")
    before = contents(tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"out\.incomplete .*left alone; move it away, or choose another"):
        find_conversion(tmp_path / "out", MODEL, overwrite=overwrite)
    with pytest.raises(CheckpointMismatchError, match=r"out\.incomplete .*left alone"):
        publish.check_export(tmp_path / "out", overwrite=overwrite)
    with pytest.raises(CheckpointError, match=r"out\.incomplete .*left alone"):
        publish.start_pending(tmp_path / "out", what="a conversion")
    with (
        pytest.raises(CheckpointError, match="cannot write y"),
        publish.removed_on_failure(tmp_path / "out.incomplete", what="y"),
    ):
        raise OSError("x")
    assert contents(tmp_path) == before


def test_what_comes_during_a_conversion_stays(tmp_path: Path) -> None:
    pending = publish.start_pending(tmp_path / "out", what="a conversion", holds=OURS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"out has no manifest\.json of ours"):
        publish.publish(pending, tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_what_is_overwritten_goes_but_not_what_its_links_lead_to(tmp_path: Path) -> None:
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    for folder in (theirs, out):
        folder.mkdir()
        (folder / "weights").write_text("precious")
    (out / "link").symlink_to(theirs)
    (out / "file").symlink_to(theirs / "weights")
    make(out, overwrite=True)
    assert find_conversion(out, MODEL) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "theirs"]
    assert (theirs / "weights").read_text() == "precious"


def test_an_overwriting_that_was_cut_short_is_finished_by_the_next(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    unlink = ownership._unlink

    def power_cut(folder: Path, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ownership, "_unlink", power_cut)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", overwrite=True)
    assert find_conversion(tmp_path / "out", MODEL) is not None
    monkeypatch.setattr(ownership, "_unlink", unlink)
    make(tmp_path / "out", ConvertedModel(fingerprint="0" * 16, dtype="float32"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
