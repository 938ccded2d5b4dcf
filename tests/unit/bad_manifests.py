"""Manifests that no save has written, by what is wrong with them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS

SHARD = f"{SHARDS}/__0_0.distcp"
RECORD = {"bytes": 5, "digest": "crc32:00000000"}
POSITION = {"epoch": 1, "position": 3, "num_prompts": 8}

FIELDS: dict[str, dict[str, Any]] = {
    "step of another type": {"step": "20"},
    "step of a boolean": {"step": True},
    "step of a fraction": {"step": 20.0},
    "negative step": {"step": -20},
    "huge step": {"step": 10**30},
    "step of another folder": {"step": 10},
    "time of another type": {"saved_at": "yesterday"},
    "time of null": {"saved_at": None},
    "time of a list": {"saved_at": [1.0]},
    "time of a distant future": {"saved_at": 1e18},
    "time before time": {"saved_at": -1.0},
    "infinite time": {"saved_at": float("inf")},
    "time that is no number": {"saved_at": float("nan")},
    "negative serial": {"serial": -1},
    "huge serial": {"serial": 2**63},
    "serial of another type": {"serial": "9"},
    "no files": {"files": {}},
    "list of files": {"files": [SHARD]},
    "file of another type": {"files": {SHARD: 5}},
    "negative size": {"files": {SHARD: {**RECORD, "bytes": -5}}},
    "size of another type": {"files": {SHARD: {**RECORD, "bytes": "5"}}},
    "size that is no number": {"files": {SHARD: {**RECORD, "bytes": float("nan")}}},
    "digest of another kind": {"files": {SHARD: {**RECORD, "digest": "md5:0"}}},
    "digest of two lines": {"files": {SHARD: {**RECORD, "digest": "crc32:0\n"}}},
    "no digest": {"files": {SHARD: {"bytes": 5}}},
    "file outside": {"files": {"../global_step_10/manifest.json": RECORD}},
    "file by an absolute name": {"files": {"/etc/passwd": RECORD}},
    "file by a detour": {"files": {f"{SHARDS}/../{SHARD}": RECORD}},
    "file by another spelling": {"files": {f"./{SHARD}": RECORD}},
    "file without a name": {"files": {"": RECORD}},
    "file that is the folder": {"files": {".": RECORD}},
    "file with a null byte": {"files": {"a\0b": RECORD}},
    "file with a lone surrogate": {"files": {"a\ud800": RECORD}},
    "long name": {"files": {"a/" * 4096 + "a": RECORD}},
    "layout of texts": {"layout": {"tensor": "1"}},
    "negative layout": {"layout": {"tensor": -1}},
    "layout of a list": {"layout": [1]},
    "versions of numbers": {"versions": {"torch": 2}},
    "long fingerprint": {"model_fingerprint": "a" * 10**6},
    "fingerprint of another type": {"model_fingerprint": None},
    "state of a list": {"driver_state": []},
    "state that is no number": {"driver_state": {"loss": float("nan")}},
    "digests of a list": {"digests": []},
    "unknown field": {"note": "best so far"},
    "schema of another type": {"schema": "3"},
    "schema of zero": {"schema": 0},
    "schema of a list": {"schema": [3]},
    "schema of a boolean": {"schema": True},
    "old schema with a serial": {"schema": 2},
    "newer schema": {"schema": 4},
}
TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "half of one": b'{"step": 20, "fil',
    "a list": b"[]",
    "null": b"null",
    "no text": b"\xff\xfe\x00",
    "deeply nested": b"[" * 100_000,
    "a number of a million digits": b'{"step": ' + b"1" * 10**6 + b"}",
}


def rewritten(path: Path, **changes: Any) -> Path:
    fields = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**fields, **changes}))
    return path


def too_large(path: Path) -> None:
    with (path / MANIFEST).open("r+b") as file:
        file.truncate(2**40)


def link_outside(path: Path) -> None:
    (path / MANIFEST).rename(path.parent.parent / "elsewhere.json")
    (path / MANIFEST).symlink_to(path.parent.parent / "elsewhere.json")


def link_to_itself(path: Path) -> None:
    (path / MANIFEST).unlink()
    (path / MANIFEST).symlink_to(MANIFEST)


def fifo(path: Path) -> None:
    (path / MANIFEST).unlink()
    os.mkfifo(path / MANIFEST)


def folder(path: Path) -> None:
    (path / MANIFEST).unlink()
    (path / MANIFEST).mkdir()


HOSTILE: dict[str, Callable[[Path], object]] = {
    **{kind: lambda path, changes=changes: rewritten(path, **changes) for kind, changes in FIELDS.items()},
    **{kind: lambda path, text=text: (path / MANIFEST).write_bytes(text) for kind, text in TEXTS.items()},
    "a terabyte": too_large,
    "a link outside": link_outside,
    "a link to itself": link_to_itself,
    "a FIFO": fifo,
    "a folder": folder,
}
