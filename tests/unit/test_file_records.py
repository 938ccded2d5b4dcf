"""A manifest's records of files: every file that a rank has reported must be there."""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.folders.durable import write_new
from rl_safe_workers.checkpoint.save.writer import WrittenFile, file_records, write_items
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_errors import ForeignCause, classify

CONTENT = b"shard"


def reported(path: Path, size_bytes: int = len(CONTENT)) -> dict[str, WrittenFile]:
    return {path.name: WrittenFile(name=path.name, size_bytes=size_bytes, digest="crc32:0badcafe", lengths=[])}


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "dist_ckpt" / "__0_0.distcp"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    return path


def test_a_reported_file_keeps_its_digest_and_others_are_read(shard: Path, tmp_path: Path) -> None:
    (shard.parent / ".metadata").write_bytes(b"few")
    assert file_records(tmp_path, reported(shard)) == {
        "dist_ckpt/.metadata": {"bytes": 3, "digest": f"crc32:{zlib.crc32(b'few'):08x}"},
        "dist_ckpt/__0_0.distcp": {"bytes": len(CONTENT), "digest": "crc32:0badcafe"},
    }


@pytest.mark.parametrize(
    "write", [lambda path: write_new(path, "{}"), lambda path: write_items(path, [CONTENT])], ids=["text", "tensors"]
)
def test_a_disk_that_is_full_is_named_with_the_file(
    write: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "file"
    with pytest.raises(OSError, match=re.escape(f"[Errno 28] No space left on device: '{path}'")) as raised:
        write(path)
    assert classify(raised.value) is ForeignCause.NO_SPACE


def test_a_file_that_was_written_and_is_gone_is_an_error(shard: Path, tmp_path: Path) -> None:
    files = reported(shard)
    shard.unlink()
    with pytest.raises(CheckpointError, match="__0_0.distcp of .* were written, and are gone"):
        file_records(tmp_path, files)


def test_a_file_that_was_cut_since_is_an_error(shard: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has 5 bytes, 9 were written"):
        file_records(tmp_path, reported(shard, size_bytes=9))
