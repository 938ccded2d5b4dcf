"""A manifest's records of files: every file that a rank has reported must be there."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from rl_safe_workers.checkpoint.save.writer import WrittenFile, file_records
from rl_safe_workers.errors import CheckpointError

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


def test_a_file_that_was_written_and_is_gone_is_an_error(shard: Path, tmp_path: Path) -> None:
    files = reported(shard)
    shard.unlink()
    with pytest.raises(CheckpointError, match="__0_0.distcp of .* were written, and are gone"):
        file_records(tmp_path, files)


def test_a_file_that_was_cut_since_is_an_error(shard: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has 5 bytes, 9 were written"):
        file_records(tmp_path, reported(shard, size_bytes=9))
