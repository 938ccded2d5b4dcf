"""Folders that are not ours, or not all ours, at places where a save wants its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS
from rl_safe_workers.checkpoint.folders.ownership import MARKER
from tests.unit.saves import saved

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
TRACKERS: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to(path.parent.parent / "notes.txt"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "FIFO": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "file of someone else": lambda path: path.write_text("all my numbers"),
    "long file": lambda path: path.write_text("1" * 100),
    "bytes": lambda path: path.write_bytes(b"\xff\x00"),
}
"""By what is at the name of the file that says which step is the newest."""
