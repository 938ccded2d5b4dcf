"""Attacks on what removes: whatever is not ours, or lies behind a link, keeps every byte."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint import ownership, retention
from rl_safe_workers.checkpoint.manifest import MANIFEST, SHARDS, complete_checkpoints
from rl_safe_workers.checkpoint.ownership import INCOMPLETE, MARKER, REPLACED, claim, remove, why_foreign
from rl_safe_workers.checkpoint.retention import check_places, commit, prune, settle, start_save
from rl_safe_workers.checkpoint.step_tracker import TRACKER, write_tracker
from rl_safe_workers.errors import CheckpointError
from tests.unit.test_manifest import saved, written

STEP = 5
FINAL = f"global_step_{STEP}"
SHARD = f"{SHARDS}/__0_0.distcp"


def contents(root: Path) -> dict[str, str]:
    """Everything below a folder, by path: a file's bytes, a link's target, else the kind. Follows no link."""
    found = {}
    for at, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(at, name)
            if path.is_symlink():
                found[str(path)] = f"link to {path.readlink()}"
            else:
                found[str(path)] = path.read_text() if path.is_file() else f"mode {path.lstat().st_mode:o}"
    return found


def ours(path: Path, step: int = STEP) -> Path:
    """A complete checkpoint, saved elsewhere and brought to a path."""
    workshop = path.with_name(f"{path.name} workshop")
    saved(workshop, step).rename(path)
    shutil.rmtree(workshop)
    return path


def link_to(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def link(path: Path) -> None:
        archive = path.parent.parent / "archive"
        archive.mkdir(exist_ok=True)
        make(archive / path.name)
        path.symlink_to(archive / path.name)

    return link


def moved_behind_a_link(name: str) -> Callable[[Path], object]:
    """A checkpoint of ours of which one part is a link to the user's archive."""

    def make(path: Path) -> None:
        archive = path.parent.parent / "archive"
        archive.mkdir(exist_ok=True)
        (ours(path) / name).rename(archive / "part")
        (path / name).symlink_to(archive / "part")

    return make


def ours_and(name: str, text: str = "mine") -> Callable[[Path], object]:
    def make(path: Path) -> None:
        target = ours(path) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    return make


def ours_with_manifest(**changes: object) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        manifest = ours(path) / MANIFEST
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **changes}))

    return make


def of_verl(path: Path) -> None:
    (path / "actor" / "model" / SHARDS).mkdir(parents=True)
    (path / "actor" / "ckpt_contents.json").write_text("{}")
    (path / "actor" / "model" / SHARD).write_text("weights")


def shards_alone(path: Path) -> None:
    (path / SHARDS).mkdir(parents=True)
    (path / SHARD).write_text("weights")


def marked(holds: str) -> Callable[[Path], object]:
    """The user's file beside a marker of ours, or one like it."""

    def make(path: Path) -> None:
        path.mkdir()
        (path / MARKER).write_text(holds)
        (path / "notes.txt").write_text("mine")

    return make


def fifo_in(path: Path) -> None:
    os.mkfifo(ours(path) / SHARDS / "pipe")


def manifest_is_a_fifo(path: Path) -> None:
    (ours(path) / MANIFEST).unlink()
    os.mkfifo(path / MANIFEST)


def no_loss(path: Path) -> None:
    path.mkdir()
    (path / "link").symlink_to(path.parent.parent / "archive")


A_MARKER = json.dumps({"host": "h", "pid": 1, "what": "a save", "holds": [SHARDS]})
FOREIGN: dict[str, Callable[[Path], object]] = {
    "link to a checkpoint": link_to(ours),
    "link to a folder": link_to(of_verl),
    "dangling link": link_to(lambda path: None),
    "link to itself": lambda path: path.symlink_to(path),
    "file": lambda path: path.write_text("mine"),
    "FIFO": os.mkfifo,
    "verl's layout": of_verl,
    "shards without a manifest": shards_alone,
    "a link alone": no_loss,
    "file beside ours": ours_and("notes.txt"),
    "file among the shards": ours_and(f"{SHARDS}/notes.txt"),
    "file in a folder": ours_and("eval/result.json"),
    "empty folder in ours": lambda path: (ours(path) / "eval").mkdir(),
    "FIFO in ours": fifo_in,
    "manifest is a FIFO": manifest_is_a_fifo,
    "manifest behind a link": moved_behind_a_link(MANIFEST),
    "shard behind a link": moved_behind_a_link(SHARD),
    "shards behind a link": moved_behind_a_link(SHARDS),
    "manifest is torn": lambda path: (ours(path) / MANIFEST).write_text('{"step": 5, '),
    "manifest of another step": ours_with_manifest(step=6),
    "manifest without files": ours_with_manifest(files={}),
    "manifest of files outside": ours_with_manifest(files={"../archive": {"bytes": 1, "digest": "crc32:0"}}),
    "manifest of a newer schema": ours_with_manifest(schema=99),
    "marker of nothing like it": marked(A_MARKER),
    "marker that is none": marked("mine, too"),
    "marker of a link": lambda path: (path.mkdir(), (path / MARKER).symlink_to("x"), (path / "y").write_text("")),
}
"""By what is at a path that we want for ourselves."""


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
"""What a save that was killed leaves at each moment."""


@pytest.mark.parametrize("kind", EMPTY)
def test_what_a_killed_save_left_is_known_as_ours(kind: str, root: Path) -> None:
    EMPTY[kind](root / f"{FINAL}{INCOMPLETE}")
    assert why_foreign(root / f"{FINAL}{INCOMPLETE}") is None
    settle(root)
    assert list(root.iterdir()) == []


TRACKERS: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to(path.parent.parent / "notes.txt"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "FIFO": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "file of someone else": lambda path: path.write_text("all my numbers"),
    "long file": lambda path: path.write_text("1" * 100),
    "bytes": lambda path: path.write_bytes(b"\xff\x00"),
}


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
