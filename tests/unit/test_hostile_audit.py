"""Checkpoints that were made to hurt whoever audits them: each ends soon, on one line, and touches nothing else."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from rl_safe_workers.checkpoint.audit import audit, audit_here
from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS
from rl_safe_workers.checkpoint.format.archives import _after_zeros, crc32_of
from rl_safe_workers.checkpoint.format.unpickle import STEPS
from tests.torch_dist import grid, write_checkpoint, write_metadata

TIB = 2**40
LONGEST_S = 20.0
"""Five seconds on an idle machine; the tests share theirs."""

METADATA_CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
DOUBLED = b"K\x00" + b"2\x86" * 64
"""A tuple of two equal tuples of two equal tuples, 64 deep: to hash or print it takes for ever."""


def _audit(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rl_safe_workers", "audit", str(directory), *options],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert time.monotonic() - started_s < LONGEST_S
    return done


def _program(directory: Path, body: bytes) -> None:
    (directory / ".metadata").write_bytes(b"\x80\x04" + body + b".")


def _rename_key(directory: Path, key: str) -> None:
    metadata = write_checkpoint(directory, {key: grid((4,), (4,))})
    write_metadata(directory, metadata)


def _place_in(directory: Path, name: str) -> None:
    metadata = write_checkpoint(directory, {"weight": grid((4,), (4,))})
    metadata.storage_data[MetadataIndex("weight", (0,))].relative_path = name
    write_metadata(directory, metadata)


def _replace(directory: Path, name: str, make: Callable[[Path], object]) -> None:
    (directory / name).unlink()
    make(directory / name)


def _hole(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.truncate(size)


def _zip(records: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, data in records.items():
            file.writestr(f"archive/{name}", data)
    return stream.getvalue()


def _common(directory: Path, body: bytes) -> None:
    (directory / "common.pt").write_bytes(_zip({"data.pkl": b"\x80\x02" + body + b"."}))


ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a key of a lone surrogate": (lambda d: _rename_key(d, "a\ud800"), "is malformed"),
    "a key that moves the cursor": (lambda d: _rename_key(d, "a\x1b[2J\nb"), "is malformed"),
    "a file name of a lone surrogate": (lambda d: _place_in(d, "\ud800"), "is malformed"),
    "a file name of 300 bytes": (lambda d: _place_in(d, "x" * 300), "is malformed"),
    "an offset of 10000 digits": (
        lambda d: _program(d, METADATA_CLASS + b"\x8b" + struct.pack("<I", 4200) + b"\x7f" * 4200 + b"\x85R"),
        "is malformed",
    ),
    "metadata that is a hole": (lambda d: _replace(d, ".metadata", lambda p: _hole(p, 8 * 2**30)), "mostly a hole"),
    "metadata that is this process's memory": (
        lambda d: _replace(d, ".metadata", lambda p: p.symlink_to("/proc/self/mem")),
        "a link that leads out of",
    ),
    "metadata that is a FIFO": (lambda d: _replace(d, ".metadata", os.mkfifo), "not a regular file"),
    "a format that is a FIFO": (lambda d: _replace(d, "metadata.json", os.mkfifo), "not a regular file"),
    "a common file that is a FIFO": (lambda d: _replace(d, "common.pt", os.mkfifo), "not a regular file"),
    "shards that are a FIFO": (lambda d: _replace(d, "__0_0.distcp", os.mkfifo), "not a regular file"),
    "shards that are the kernel's log": (
        lambda d: _replace(d, "__0_0.distcp", lambda p: p.symlink_to("/proc/kmsg")),
        "a link that leads out of",
    ),
    "shards elsewhere": (
        lambda d: _replace(d, "__0_0.distcp", lambda p: p.symlink_to("/etc/passwd")),
        "a link that leads out of",
    ),
    "a link to itself": (lambda d: _replace(d, "__0_0.distcp", lambda p: p.symlink_to(p.name)), "symbolic links"),
    "a hash without end": (
        lambda d: _program(d, METADATA_CLASS + b"}" + DOUBLED + b"Ns\x85R"),
        "s of processor time",
    ),
    "a text without end": (lambda d: _program(d, b"cbuiltins\nstr\n" + DOUBLED + b"\x85R"), "asks for builtins.str"),
    "a memo of gigabytes": (lambda d: _program(d, b"Nr" + struct.pack("<I", 2**30)), "memory|MemoryError"),
    "bytes of exabytes": (lambda d: _program(d, b"\x96" + struct.pack("<Q", 2**60)), "is damaged"),
    "a pickle of a crash": (lambda d: _program(d, b"}" + b")" + b"\x85" * 10**6 + b"Ns"), "killed by SIGSEGV"),
    "a nest of lists": (lambda d: _program(d, b"]" * 10**6), "is damaged|holds a"),
    "a format of a nest": (lambda d: (d / "metadata.json").write_text("[" * 10**5), "cannot be read"),
    "a format of a long number": (
        lambda d: (d / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist"})[:-1] + ', "sharded_backend_version": ' + "9" * 10**4 + "}"
        ),
        "cannot be read",
    ),
    "a format of a long name": (
        lambda d: (d / "metadata.json").write_text(json.dumps({"sharded_backend": "\x1b[2J" * 10**4})),
        "only 'torch_dist'",
    ),
    "a common file that asks for a hash without end": (lambda d: _common(d, b"}" + DOUBLED + b"Ns"), "is damaged"),
    "a common file of many steps": (lambda d: _common(d, b"]" * 10**7), f"more than {STEPS} steps"),
    "a common file that changes an enum": (
        lambda d: _common(d, b"csignal\nSignals\n}X\x07\x00\x00\x00_value_K\x09sb"),
        "a state for a Name",
    ),
    "a common file that is a hole": (
        lambda d: _replace(d, "common.pt", lambda p: _hole(p, TIB)),
        "no archive of torch.save",
    ),
}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_file_ends_the_audit_on_a_line(tmp_path: Path, attack: str) -> None:
    directory = tmp_path / "iter_1"
    make, said = ATTACKS[attack]
    write_checkpoint(directory, {"weight": grid((4,), (4,))})
    make(directory)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    for options in ((), ("--deep", "--json")):
        done = _audit(directory, *options)
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
        "<4s6H3I5H2I", b"PK\1\2", 45, 45, 0, 0, 0, 0, _after_zeros(0, size), 2**32 - 1, 2**32 - 1, 9, len(extra), 0, 0,
        0, 0, 0,
    )  # fmt: skip
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
    _hole(root / SHARDS / "__0_0.distcp", 10 * TIB)
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
    done = _audit(tmp_path / "given")
    assert (done.returncode, done.stdout) == (1, "")
    assert "holds no torch_dist checkpoint" in done.stderr


@pytest.mark.parametrize("name", ["x" * 300, "\udc80", "a\x1b[2J"])
def test_an_impossible_directory_is_a_usage_error(tmp_path: Path, name: str) -> None:
    done = _audit(tmp_path / name)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False)
    assert done.stderr.replace("\n", "").isprintable()


def test_the_folder_that_is_audited_is_no_place_for_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, {})
    for name in ("json", "pickle", "rl_safe_workers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert audit(Path()).problems == ()
