"""A manifest makes a directory a checkpoint. No interruption makes a wrong one or loses a right one."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.checkpoint.folders import durable, retention
from rl_safe_workers.checkpoint.folders.durable import write_durably
from rl_safe_workers.checkpoint.folders.manifest import (
    MANIFEST,
    SHARDS,
    Manifest,
    check_fingerprint,
    complete_checkpoints,
    find_checkpoints,
    model_fingerprint,
    read_manifest,
    step_dir,
)
from rl_safe_workers.checkpoint.folders.ownership import MARKER
from rl_safe_workers.checkpoint.folders.retention import commit, prune, settle
from rl_safe_workers.checkpoint.folders.step_tracker import TRACKER
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError
from tests.unit.saves import saved, written


class PowerCutError(BaseException):
    """The process ends here and cleans nothing up."""


class Disk:
    """Records what is made durable, renamed and removed, in order, and can fail before any of it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.events = root, list[str]()
        self.fail_before: int | None = None
        self._patch = monkeypatch
        for module in (durable, retention):
            self._wrap(module, "fsync", lambda path: f"fsync {self.name(path)}")
        for name in ("rename", "replace"):
            self._wrap(os, name, lambda path, target: f"rename {self.name(path)} -> {self.name(target)}")
        for name in ("unlink", "rmdir"):
            self._wrap(os, name, lambda path, *, dir_fd=None, name=name: f"{name} {self.name(path, dir_fd)}")

    def name(self, path: str | Path, dir_fd: int | None = None) -> str:
        folder = Path() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        return os.path.relpath(folder / path, self.root)

    def _wrap(self, owner: Any, attribute: str, describe: Callable[..., str]) -> None:
        original = getattr(owner, attribute)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if len(self.events) == self.fail_before:
                raise PowerCutError
            self.events.append(describe(*args, **kwargs))
            return original(*args, **kwargs)

        self._patch.setattr(owner, attribute, wrapped)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def found(root: Path) -> list[str]:
    return [path.name for path, _ in complete_checkpoints(root)]


def test_a_commit_makes_shards_durable_then_the_manifest_then_the_name_then_the_tracker(tmp_path, monkeypatch) -> None:
    pending, manifest = written(tmp_path, 20)
    disk = Disk(tmp_path, monkeypatch)
    commit(pending, manifest)
    folder = "global_step_20.incomplete"
    assert disk.events == [
        f"fsync {folder}/{MARKER}",
        f"fsync {folder}/dist_ckpt",
        f"fsync {folder}/dist_ckpt/__0_0.distcp",
        f"fsync {folder}/manifest.json.tmp",
        f"rename {folder}/manifest.json.tmp -> {folder}/manifest.json",
        f"fsync {folder}",
        f"rename {folder} -> global_step_20",
        "fsync .",
        f"unlink global_step_20/{MARKER}",
        f"unlink {TRACKER}.tmp",
        f"fsync {TRACKER}.tmp",
        f"rename {TRACKER}.tmp -> {TRACKER}",
        "fsync .",
    ]


def test_a_committed_checkpoint_reads_back_whole(tmp_path: Path) -> None:
    pending, manifest = written(tmp_path, 20)
    path = commit(pending, manifest)
    assert path == step_dir(tmp_path, 20)
    assert read_manifest(path) == manifest
    assert names(tmp_path) == ["global_step_20", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "20"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(tmp_path, monkeypatch)
    for moment in (0, 1):
        file = tmp_path / str(moment)
        disk.fail_before = None
        write_durably(file, "old")
        disk.events.clear()
        disk.fail_before = moment
        with pytest.raises(PowerCutError):
            write_durably(file, "new")
        assert file.read_text() == "old"


def test_a_file_that_could_not_be_written_leaves_nothing_beside_it(tmp_path: Path, monkeypatch) -> None:
    file, rename = tmp_path / "file", Path.rename
    write_durably(file, "old")

    def fail(path: Path, target: Path) -> Path:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_durably(file, "new")
    assert (names(tmp_path), file.read_text()) == (["file"], "old")
    monkeypatch.setattr(Path, "rename", rename)
    write_durably(file, "new")
    assert file.read_text() == "new"


def test_a_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "file").symlink_to("theirs")
    write_durably(tmp_path / "file", "new")
    assert not (tmp_path / "file").is_symlink()
    (tmp_path / "file.tmp").symlink_to("theirs")
    with pytest.raises(FileExistsError):
        write_durably(tmp_path / "file", "newer")
    assert (tmp_path / "theirs").read_text() == "precious"
    assert (tmp_path / "file").read_text() == "new"


def test_a_file_of_someone_else_by_the_temporary_name_stays(tmp_path: Path) -> None:
    (tmp_path / "file.tmp").write_text("precious")
    with pytest.raises(FileExistsError):
        write_durably(tmp_path / "file", "new")
    assert (tmp_path / "file.tmp").read_text() == "precious"


def commit_until(fail_before: int | None, root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces step 20, beside which there is step 10, and cuts the power before one of the events."""
    for step in (10, 20):
        saved(root, step)
    pending, manifest = written(root, 20, "another shard")
    with monkeypatch.context() as patch, suppress(PowerCutError):
        disk = Disk(root, patch)
        disk.fail_before = fail_before
        commit(pending, replace(manifest, driver_state={"position": "new"}, saved_at=5000.0))
    return disk.events


def test_at_no_moment_of_a_replacement_is_a_step_without_a_complete_checkpoint(tmp_path, monkeypatch) -> None:
    events = commit_until(None, tmp_path / "whole", monkeypatch)
    manifest_is_there = events.index(
        "rename global_step_20.incomplete/manifest.json.tmp -> global_step_20.incomplete/manifest.json"
    )
    assert len(events) > 12
    for moment in range(len(events)):
        root = tmp_path / str(moment)
        commit_until(moment, root, monkeypatch)
        newest = complete_checkpoints(root)[0][1]
        assert newest.step == 20
        assert newest.driver_state["position"] == ("new" if moment > manifest_is_there else 20)
        assert (root / TRACKER).read_text() == "20"


def test_what_a_power_cut_left_is_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = commit_until(None, tmp_path / "whole", monkeypatch)
    for moment in range(len(events)):
        root = tmp_path / str(moment)
        commit_until(moment, root, monkeypatch)
        new_is_complete = (root / "global_step_20.incomplete" / MANIFEST).is_file()
        settle(root)
        assert [name for name in names(root) if name.startswith("global")] == ["global_step_10", "global_step_20"]
        if new_is_complete:
            assert (root / "global_step_20" / SHARDS / "__0_0.distcp").read_text() == "another shard"
        assert found(root) == ["global_step_20", "global_step_10"]
        # The next save of the step finds its place free.
        assert commit(*written(root, 20)).name == "global_step_20"


def test_the_old_checkpoint_of_a_step_stays_until_the_new_one_is_complete(tmp_path, monkeypatch) -> None:
    events = commit_until(None, tmp_path, monkeypatch)
    gives_way = events.index("rename global_step_20 -> global_step_20.replaced.incomplete")
    takes_its_place = events.index("rename global_step_20.incomplete -> global_step_20")
    removed = events.index("rmdir global_step_20.replaced.incomplete")
    is_durable = events.index("fsync global_step_20.incomplete")
    assert is_durable < gives_way < takes_its_place < removed
    assert (tmp_path / "global_step_20" / SHARDS / "__0_0.distcp").read_text() == "another shard"
    assert names(tmp_path) == ["global_step_10", "global_step_20", TRACKER]


def test_a_save_in_progress_is_never_picked_up(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    written(tmp_path, 20)
    assert found(tmp_path) == ["global_step_10"]
    assert find_checkpoints(tmp_path).damaged == []


def test_a_final_name_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    (tmp_path / "global_step_30").mkdir()
    assert found(tmp_path) == ["global_step_10"]
    with pytest.raises(CheckpointError, match=r"global_step_30 is not a complete checkpoint: it has no manifest\.json"):
        read_manifest(tmp_path / "global_step_30")


def test_other_directories_and_files_are_passed_over(tmp_path: Path) -> None:
    path = saved(tmp_path, 10)
    shutil.copytree(path, tmp_path / "my_copy")
    shutil.copytree(path, tmp_path / "global_step_10_backup")
    (tmp_path / "global_step_11").write_text("a file")
    assert found(tmp_path) == ["global_step_10"]


def test_there_are_no_checkpoints_where_there_is_no_directory(tmp_path: Path) -> None:
    assert found(tmp_path / "nowhere") == []
    settle(tmp_path / "nowhere")


def test_the_newest_is_the_one_saved_last_whatever_step_and_clock_say(tmp_path: Path) -> None:
    saved(tmp_path, 30, at=300.0)
    saved(tmp_path, 10, at=100.0)
    saved(tmp_path, 20, at=200.0)
    assert found(tmp_path) == ["global_step_20", "global_step_10", "global_step_30"]


def shorten(path: Path) -> None:
    (path / SHARDS / "__0_0.distcp").write_text("sha")


def lose(path: Path) -> None:
    (path / SHARDS / "__0_0.distcp").unlink()


def garble(path: Path) -> None:
    (path / MANIFEST).write_text('{"step": 10')


def drop_a_key(path: Path) -> None:
    contents = json.loads((path / MANIFEST).read_text())
    del contents["layout"]
    (path / MANIFEST).write_text(json.dumps(contents))


def make_a_list(path: Path) -> None:
    (path / MANIFEST).write_text("[1, 2]")


DAMAGES = {
    "shortened": (shorten, "is damaged: dist_ckpt/__0_0.distcp has 3 bytes, 5 bytes were written"),
    "lost": (lose, "is damaged: dist_ckpt/__0_0.distcp is missing, 5 bytes were written"),
    "garbled_manifest": (garble, "manifest.json cannot be read: "),
    "manifest_without_a_key": (drop_a_key, "manifest.json is malformed: layout: Field required"),
    "manifest_of_another_kind": (make_a_list, "manifest.json cannot be read: "),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_says_what_is_wrong_and_is_passed_over(damage, message, tmp_path: Path) -> None:
    saved(tmp_path, 10)
    damage(saved(tmp_path, 20))
    with pytest.raises(CheckpointError) as raised:
        read_manifest(tmp_path / "global_step_20")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    result = find_checkpoints(tmp_path)
    assert [path.name for path, _ in result.complete] == ["global_step_10"]
    assert [str(error) for error in result.damaged] == [str(raised.value)]


def test_a_file_that_was_added_later_does_no_harm(tmp_path: Path) -> None:
    path = saved(tmp_path, 10)
    (path / "notes.txt").write_text("best run so far")
    assert read_manifest(path).step == 10


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        saved(tmp_path, step)
    assert [path.name for path in prune(tmp_path, keep_last=2)] == ["global_step_20", "global_step_10"]
    assert found(tmp_path) == ["global_step_40", "global_step_30"]
    assert prune(tmp_path, keep_last=2) == []


def test_prune_of_zero_keeps_all(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        saved(tmp_path, step)
    assert prune(tmp_path, keep_last=0) == []
    assert len(found(tmp_path)) == 3


def test_prune_leaves_a_save_in_progress_alone(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    pending, _ = written(tmp_path, 20)
    assert prune(tmp_path, keep_last=1) == []
    assert pending.is_dir()


def test_a_half_removed_checkpoint_is_neither_complete_nor_damaged(tmp_path, monkeypatch) -> None:
    for step in (10, 20):
        saved(tmp_path, step)
    disk = Disk(tmp_path, monkeypatch)
    disk.fail_before = 3
    with pytest.raises(PowerCutError):
        prune(tmp_path, keep_last=1)
    removed = "global_step_10.replaced.incomplete"
    assert disk.events == [
        f"rename global_step_10 -> {removed}",
        f"rename {removed}/manifest.json -> {removed}/{MARKER}",
        f"unlink {removed}/dist_ckpt/__0_0.distcp",
    ]
    assert found(tmp_path) == ["global_step_20"]
    assert find_checkpoints(tmp_path).damaged == []
    monkeypatch.undo()
    settle(tmp_path)
    assert [name for name in names(tmp_path) if name.startswith("global")] == ["global_step_20"]


def test_what_was_just_committed_stays_however_old_it_looks(tmp_path) -> None:
    for step in (10, 20):
        saved(tmp_path, step)
    oldest = complete_checkpoints(tmp_path)[-1][0]
    assert prune(tmp_path, keep_last=1, but=oldest) == []


def test_what_cannot_be_removed_is_a_warning_and_the_rest_goes(tmp_path, monkeypatch, caplog) -> None:
    for step in (10, 20, 30):
        saved(tmp_path, step)
    rename = Path.rename

    def busy(path: Path, target: Path) -> Path:
        if path.name.startswith("global_step_20"):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", busy)
    with caplog.at_level(logging.WARNING):
        assert [path.name for path in prune(tmp_path, keep_last=1)] == ["global_step_10"]
    assert "cannot be removed" in caplog.text
    assert "global_step_20" in caplog.text


def check(fingerprint: str) -> None:
    manifest = Manifest(
        step=1, model_fingerprint="abc", layout={}, saved_at=0.0, versions={}, files={}, driver_state={}, digests={}
    )
    check_fingerprint(manifest, path=Path("global_step_1"), fingerprint=fingerprint)


def test_its_own_model_matches() -> None:
    check("abc")


def test_another_model_is_refused_with_both_fingerprints() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"another model \(fingerprint abc, model\.path has xyz\)"):
        check("xyz")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "dtype": "float32"}))
    (tmp_path / "model.safetensors").write_bytes(bytes(300_000))
    return tmp_path


def rewrite_config(model: Path, **changes: Any) -> str:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}, indent=4))
    return model_fingerprint(model)


def test_the_fingerprint_changes_with_the_architecture_only(model: Path) -> None:
    before = model_fingerprint(model)
    assert rewrite_config(model, dtype="bfloat16", transformers_version="9", use_cache=False) == before
    assert rewrite_config(model, hidden_size=128) != before


@pytest.mark.parametrize("place", [0, -1], ids=["first_byte", "last_byte"])
def test_the_fingerprint_changes_with_the_weights(place: int, model: Path) -> None:
    before, contents = model_fingerprint(model), bytearray(bytes(300_000))
    contents[place] = 1
    (model / "model.safetensors").write_bytes(contents)
    assert model_fingerprint(model) != before


def test_the_fingerprint_changes_with_the_number_of_files(model: Path) -> None:
    before = model_fingerprint(model)
    (model / "model-2.safetensors").write_bytes(b"")
    assert model_fingerprint(model) != before


def test_the_manifest_says_everything_in_plain_json(tmp_path: Path) -> None:
    pending, manifest = written(tmp_path, 20)
    path = commit(pending, manifest)
    assert json.loads((path / MANIFEST).read_text()) == {**asdict(manifest), "serial": 1}
