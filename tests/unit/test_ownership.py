"""Attacks on what removes: whatever is not ours, or lies behind a link, keeps every byte."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.folders import ownership, retention
from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS, complete_checkpoints
from rl_safe_workers.checkpoint.folders.ownership import INCOMPLETE, MARKER, REPLACED, claim, remove, why_foreign
from rl_safe_workers.checkpoint.folders.retention import check_places, commit, prune, settle, start_save
from rl_safe_workers.checkpoint.folders.step_tracker import TRACKER, write_tracker
from rl_safe_workers.errors import CheckpointError
from tests.unit.foreign_folders import (
    FINAL,
    FOREIGN,
    SHARD,
    STEP,
    TRACKERS,
    contents,
    of_verl,
    ours_and,
    ours_with_manifest,
)
from tests.unit.saves import saved, written


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


def assert_kept(before: dict[str, str], folder: Path) -> None:
    after = contents(folder)
    assert {path: after.get(path) for path in before} == before


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("suffix", ["", INCOMPLETE])
def test_a_save_is_refused_before_it_writes_and_names_what_is_in_the_way(kind: str, suffix: str, root: Path) -> None:
    place = root / f"{FINAL}{suffix}"
    FOREIGN[kind](place)
    before = contents(root.parent)
    for refuse in (check_places, start_save):
        with pytest.raises(CheckpointError) as raised:
            refuse(root, STEP)
        assert str(raised.value).startswith(f"{place} ")
        assert "it is left alone; move it away, or set trainer.default_local_dir elsewhere" in str(raised.value)
        assert "\n" not in str(raised.value)
    assert contents(root.parent) == before


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_replaced_checkpoint_finds_its_place_taken_and_stays(kind: str, root: Path) -> None:
    saved(root, STEP)
    FOREIGN[kind](root / f"{FINAL}{REPLACED}")
    before = contents(root.parent)
    with pytest.raises(CheckpointError, match=r"replaced\.incomplete "):
        start_save(root, STEP)
    assert contents(root.parent) == before


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_takes_the_place_during_a_save_stays_and_so_does_the_save(kind: str, root: Path) -> None:
    pending, manifest = written(root, STEP)
    FOREIGN[kind](root / FINAL)
    before = contents(root.parent)
    with pytest.raises(CheckpointError, match=rf"{FINAL} .*load {FINAL}.incomplete, which is complete"):
        commit(pending, manifest)
    assert_kept(before, root.parent)
    assert pending in [path for path, _ in complete_checkpoints(root)]
    settle(root)
    assert_kept(before, root.parent)


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("suffix", ["", INCOMPLETE, REPLACED])
def test_later_saves_and_their_pruning_pass_over_what_is_not_ours(
    kind: str, suffix: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FOREIGN[kind](root / f"{FINAL}{suffix}")
    before = contents(root.parent)
    for step in (6, 7, 8):
        path = saved(root, step)
        prune(root, keep_last=1, but=path)
    assert_kept(before, root.parent)
    assert (root / TRACKER).read_text() == "8"
    assert sorted(path.name for path in root.glob("global_step_[678]*")) == ["global_step_8"]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(set(warnings)) <= 2


@pytest.mark.parametrize("kind", FOREIGN)
def test_remove_itself_refuses_what_is_not_ours(kind: str, root: Path) -> None:
    FOREIGN[kind](root / FINAL)
    before = contents(root.parent)
    with pytest.raises(CheckpointError, match="it is left alone"):
        remove(root / FINAL)
    assert contents(root.parent) == before


def test_a_foreign_checkpoint_takes_no_place_of_the_newest(root: Path) -> None:
    for step in (1, 2):
        saved(root, step)
    ours_with_manifest(serial=10**6)(root / FINAL)
    (root / FINAL / "notes.txt").write_text("mine")
    assert prune(root, keep_last=2) == []
    assert (root / "global_step_1").is_dir()


def test_a_complete_checkpoint_of_ours_that_lost_a_shard_gives_way(root: Path) -> None:
    (saved(root, STEP) / SHARD).unlink()
    assert why_foreign(root / FINAL) is None
    saved(root, STEP)
    assert [path.name for path, _ in complete_checkpoints(root)] == [FINAL]


def test_a_link_above_the_checkpoints_is_the_users_own_affair(tmp_path: Path) -> None:
    (tmp_path / "big disk").mkdir()
    (tmp_path / "checkpoints").symlink_to("big disk")
    for step in (1, 2, 3):
        saved(tmp_path / "checkpoints", step)
    assert len(prune(tmp_path / "checkpoints", keep_last=1)) == 2


def test_a_forged_pending_folder_does_not_replace_a_good_checkpoint(root: Path) -> None:
    """Its manifest is valid, but the shards that it lists are not there in full."""
    pending = root / f"{FINAL}{INCOMPLETE}"
    shutil.copytree(saved(root, STEP), pending)
    (pending / SHARD).write_text("")
    before = contents(root / FINAL)
    settle(root)
    assert contents(root / FINAL) == before
    assert not pending.exists()


def test_an_older_copy_under_a_pending_name_does_not_replace_the_newer(root: Path) -> None:
    shutil.copytree(saved(root, STEP), root.parent / "copy")
    saved(root, STEP)
    (root.parent / "copy").rename(root / f"{FINAL}{INCOMPLETE}")
    before = contents(root / FINAL)
    settle(root)
    assert contents(root / FINAL) == before


def test_what_is_added_during_a_removal_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, unlink = saved(root, STEP), ownership._unlink

    def add_first(folder: Path, *args: object) -> None:
        (folder / SHARDS / "notes.txt").write_text("mine")
        unlink(folder, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ownership, "_unlink", add_first)
    with pytest.raises(OSError, match="not empty"):
        remove(path)
    assert (root / f"{FINAL}{REPLACED}" / SHARDS / "notes.txt").read_text() == "mine"


def test_a_folder_that_becomes_a_link_during_a_removal_is_not_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, unlink = saved(root, STEP), ownership._unlink
    archive = root.parent / "archive"

    def swap_first(folder: Path, *args: object) -> None:
        (folder / SHARDS).rename(archive)
        (folder / SHARDS).symlink_to(archive)
        unlink(folder, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ownership, "_unlink", swap_first)
    with pytest.raises(OSError, match="Not a directory"):
        remove(path)
    assert (archive / "__0_0.distcp").read_text() == "shard"


EMPTY = {
    "empty": lambda path: path.mkdir(),
    "marker not written yet": lambda path: (path.mkdir(), (path / MARKER).write_text("")),
    "marker half written": lambda path: (path.mkdir(), (path / MARKER).write_text('{"host": ')),
    "started": lambda path: claim(path, what="a save", holds=[SHARDS]),
    "half written": lambda path: (claim(path, what="a save", holds=[SHARDS]), (path / SHARDS).mkdir()),
    "manifest not renamed": lambda path: (
        claim(path, what="a save", holds=[SHARDS]),
        (path / f"{MANIFEST}.tmp").write_text("{"),
    ),
}
"""Folders that a killed save leaves at each moment."""


@pytest.mark.parametrize("kind", EMPTY)
def test_what_a_killed_save_left_is_known_as_ours(kind: str, root: Path) -> None:
    EMPTY[kind](root / f"{FINAL}{INCOMPLETE}")
    assert why_foreign(root / f"{FINAL}{INCOMPLETE}") is None
    settle(root)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("kind", TRACKERS)
@pytest.mark.parametrize("suffix", ["", ".tmp"])
def test_a_tracker_that_is_not_ours_is_refused_before_a_save(kind: str, suffix: str, root: Path) -> None:
    (root.parent / "notes.txt").write_text("12")
    place = root / f"{TRACKER}{suffix}"
    TRACKERS[kind](place)
    listing = sorted(root.parent.rglob("*"))
    for refuse in (lambda: start_save(root, STEP), lambda: write_tracker(root, STEP)):
        with pytest.raises(CheckpointError, match=f"{place} is no file with the number of a step"):
            refuse()
    assert sorted(root.parent.rglob("*")) == listing
    assert (root.parent / "notes.txt").read_text() == "12"


@pytest.mark.parametrize("left", ["", "1", "20"])
def test_what_a_killed_write_of_the_tracker_left_is_replaced(left: str, root: Path) -> None:
    (root / f"{TRACKER}.tmp").write_text(left)
    (root / TRACKER).write_text("10")
    write_tracker(root, 20)
    assert [path.name for path in root.iterdir()] == [TRACKER]
    assert (root / TRACKER).read_text() == "20"


def test_names_cannot_give_a_terminal_orders(root: Path) -> None:
    ours_and("\x1b[2Jnotes")(root / FINAL)
    assert why_foreign(root / FINAL) == r"holds \x1b[2Jnotes, which its manifest.json does not list"


def test_warnings_of_later_saves_do_not_repeat(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    of_verl(root / f"global_step_1{INCOMPLETE}")
    for _ in range(3):
        retention.settle(root)
    assert len(caplog.records) == 1


def test_a_folder_of_many_files_is_removed_without_a_look_at_each(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system each look takes a millisecond, and a save of 4,096 ranks has as many files."""
    folder, looks = root / f"{FINAL}{INCOMPLETE}", list[object]()
    claim(folder, what="a save", holds=[SHARDS])
    (folder / SHARDS).mkdir()
    for number in range(200):
        (folder / SHARDS / f"__{number}_0.distcp").touch()
    look = os.stat
    monkeypatch.setattr(os, "stat", lambda *args, **kwargs: looks.append(args) or look(*args, **kwargs))
    remove(folder)
    assert not folder.exists()
    assert len(looks) < 50
