"""Checkpoints that were made to hurt whoever audits them: each ends soon, on one line, and touches nothing else."""

from __future__ import annotations

import json
import os
import re
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from rl_safe_workers.checkpoint.audit import audit, audit_here
from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS
from rl_safe_workers.checkpoint.format.archives import _after_zeros, crc32_of
from tests.torch_dist import grid, write_checkpoint, write_metadata
from tests.unit.hostile_checkpoints import ATTACKS, TIB, audit_in_child, hole


@pytest.mark.timeout(150)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_file_ends_the_audit_on_a_line(tmp_path: Path, attack: str) -> None:
    directory = tmp_path / "iter_1"
    make, said = ATTACKS[attack]
    write_checkpoint(directory, {"weight": grid((4,), (4,))})
    make(directory)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    for options in ((), ("--deep", "--json")):
        done = audit_in_child(directory, *options)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        text = done.stdout + done.stderr
        assert text.isascii()
        assert text.replace("\n", "").isprintable()
        assert re.search(said, text), text
        if "--json" in options and not done.stderr:
            json.loads(done.stdout)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < before + 2**20


def _vast_archive(path: Path, size: int) -> int:
    """Writes an archive with one record that is a hole of some terabytes; returns the archive's length."""
    header = struct.pack("<4s5H3I2H", b"PK\3\4", 45, 0, 0, 0, 0, 0, 0, 0, 9, 0) + b"archive/0"
    extra = struct.pack("<2H2Q", 1, 16, size, size)
    entry = struct.pack(
        "<4s6H3I5H2I",
        b"PK\1\2",
        45,
        45,
        0,
        0,
        0,
        0,
        _after_zeros(0, size),
        2**32 - 1,
        2**32 - 1,
        9,
        len(extra),
        0,
        0,
        0,
        0,
        0,
    )
    entry += b"archive/0" + extra
    start = len(header) + size
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(entry), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(entry), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(entry), 2**32 - 1, 0)
    with path.open("wb") as file:
        file.write(header)
        file.seek(size, os.SEEK_CUR)
        file.write(entry + end64 + locator + end)
        return file.tell()


def _with_one_object(directory: Path, length: int) -> None:
    index = MetadataIndex("object/shard_0_1")
    info = _StorageInfo("__0_0.distcp", 0, length)
    write_metadata(directory, Metadata({index.fqn: BytesStorageMetadata()}, storage_data={index: info}))


@pytest.mark.timeout(60)
def test_a_vast_hole_is_checked_without_being_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, objects=[])
    _with_one_object(tmp_path, _vast_archive(tmp_path / "__0_0.distcp", 10 * TIB))
    assert audit(tmp_path, deep=True).problems == ()
    with (tmp_path / "__0_0.distcp").open("r+b") as file:
        file.seek(5 * TIB)
        file.write(b"x")
    assert audit(tmp_path, deep=True).counts == {"bytes": 1}


@pytest.mark.timeout(60)
def test_a_file_of_a_wrong_size_is_not_read(tmp_path: Path) -> None:
    root = tmp_path / "global_step_1"
    write_checkpoint(root / SHARDS, {"weight": grid((4,), (4,))}, objects=[])
    hole(root / SHARDS / "__0_0.distcp", 10 * TIB)
    files = {
        f"{SHARDS}/{path.name}": {"bytes": path.stat().st_size, "digest": crc32_of(path)}
        for path in (root / SHARDS).iterdir()
    }
    files[f"{SHARDS}/__0_0.distcp"] = {"bytes": 5, "digest": "crc32:00000000"}
    manifest = {"schema": 2, "step": 1, "model_fingerprint": "x", "layout": {}, "versions": {}, "saved_at": 1.0}
    manifest |= {"files": files, "driver_state": {}, "digests": {}}
    (root / MANIFEST).write_text(json.dumps(manifest))
    assert audit(root, deep=True).counts == {"file": 1}


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Sum of what this process has read with ``os.pread``."""
    pread, counts = os.pread, list[int]()

    def count(descriptor: int, size: int, offset: int) -> bytes:
        block = pread(descriptor, size, offset)
        counts.append(len(block))
        return block

    monkeypatch.setattr(os, "pread", count)
    return lambda: sum(counts)


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_file_of_many_names_is_read_once(tmp_path: Path, has_manifest: bool, bytes_read: Callable[[], int]) -> None:
    names = 20
    shards = tmp_path / "global_step_1" / SHARDS
    write_checkpoint(shards, {f"w{n}": grid((2**18,), (2**18,)) for n in range(names)}, objects=[], files=names)
    size = (shards / "__0_0.distcp").stat().st_size
    for number in range(1, names):
        (shards / f"__{number}_0.distcp").unlink()
        (shards / f"__{number}_0.distcp").hardlink_to(shards / "__0_0.distcp")
    if has_manifest:
        files = {f"{SHARDS}/{p.name}": {"bytes": p.stat().st_size, "digest": crc32_of(p)} for p in shards.iterdir()}
        manifest = {"schema": 2, "step": 1, "model_fingerprint": "x", "layout": {}, "versions": {}, "saved_at": 1.0}
        manifest |= {"files": files, "driver_state": {}, "digests": {}}
        (shards.parent / MANIFEST).write_text(json.dumps(manifest))
    before = bytes_read()
    report = json.loads(audit_here(str(shards.parent if has_manifest else shards), str(shards), deep=True))
    assert report["counts"] == {}
    assert size <= bytes_read() - before < 2 * size
    with (shards / "__7_0.distcp").open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\1\2\3\4")
    report = json.loads(audit_here(str(shards.parent if has_manifest else shards), str(shards), deep=True))
    assert report["counts"] == {"bytes": names if has_manifest else 1}


def test_a_folder_that_is_a_link_elsewhere_is_passed_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "outside", {})
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "iter_1").symlink_to("../outside")
    done = audit_in_child(tmp_path / "given")
    assert (done.returncode, done.stdout) == (1, "")
    assert "holds no torch_dist checkpoint" in done.stderr


@pytest.mark.parametrize("name", ["x" * 300, "\udc80", "a\x1b[2J"])
def test_an_impossible_directory_is_a_usage_error(tmp_path: Path, name: str) -> None:
    done = audit_in_child(tmp_path / name)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False)
    assert done.stderr.replace("\n", "").isprintable()


def test_the_folder_that_is_audited_is_no_place_for_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, {})
    for name in ("json", "pickle", "rl_safe_workers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert audit(Path()).problems == ()
