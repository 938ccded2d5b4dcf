"""The index of a checkpoint, and the ones that are refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS
from rl_safe_workers.checkpoint.format.index import ByteRange, Chunk, locate, read_index
from rl_safe_workers.errors import CheckpointError, UnsafeCheckpointError, UsageError
from tests.torch_dist import grid, write_checkpoint, write_metadata


def test_every_chunk_and_object_has_its_bytes(tmp_path: Path) -> None:
    cut = grid((4, 6), (2, 6), torch.bfloat16)
    written = write_checkpoint(tmp_path, {"weight": cut}, objects=["rng_state/shard_0_1"])
    index = read_index(tmp_path)
    entry = index.tensors["weight"]
    assert (entry.dtype, entry.itemsize, entry.shape) == ("bfloat16", 2, (4, 6))
    info = written.storage_data[MetadataIndex("weight", (2, 0))]
    assert entry.chunks[1] == Chunk((2, 0), (2, 6), ByteRange(info.relative_path, info.offset, info.length))
    info = written.storage_data[MetadataIndex("rng_state/shard_0_1")]
    assert index.objects == {"rng_state/shard_0_1": ByteRange(info.relative_path, info.offset, info.length)}
    assert index.unclaimed == ()


def test_the_bytes_are_those_that_were_saved(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"weight": grid((4,), (2,))})
    for chunk in read_index(tmp_path).tensors["weight"].chunks:
        assert chunk.place is not None
        data = (tmp_path / chunk.place.file).read_bytes()[chunk.place.offset : chunk.place.stop]
        (tmp_path / "alone.pt").write_bytes(data)
        assert torch.load(tmp_path / "alone.pt", weights_only=True).shape == (2,)


def test_the_common_object_of_newer_megatron_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, objects=["rng_state/shard_0_1", "common_state/shard_0_1"])
    assert read_index(tmp_path).common_object == "common_state/shard_0_1"


def test_a_checkpoint_of_ours_is_found_from_its_root_its_shards_and_above(tmp_path: Path) -> None:
    root = tmp_path / "global_step_3"
    write_checkpoint(root / SHARDS, {})
    (root / MANIFEST).write_text("{}")
    for directory in (root, root / SHARDS, tmp_path):
        assert (locate(directory).root, locate(directory).shards) == (root, root / SHARDS)


def test_a_foreign_checkpoint_is_found_from_its_shards_and_above(tmp_path: Path) -> None:
    shards = tmp_path / "iter_0000010"
    write_checkpoint(shards, {})
    for directory in (shards, tmp_path):
        assert (locate(directory).root, locate(directory).shards) == (shards, shards)
    assert locate(shards).manifest is None


def test_what_is_not_one_checkpoint_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"looked for manifest.json in it, and for .metadata and metadata.json"):
        locate(tmp_path)
    for step in (1, 2):
        write_checkpoint(tmp_path / f"iter_{step}", {})
    with pytest.raises(CheckpointError, match=r"holds 2 checkpoints: give one of them \(iter_1, iter_2\)"):
        locate(tmp_path)
    with pytest.raises(UsageError, match="nothing is not a directory"):
        locate(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "the save did not finish"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ("{}", "cannot be read"),
        ('{"sharded_backend": "zarr"}', "says format 'zarr' version 1; only 'torch_dist'"),
        ('{"sharded_backend": "torch_dist", "sharded_backend_version": 2}', "version 2; only"),
    ],
)
def test_a_format_that_is_not_readable_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    write_checkpoint(tmp_path, {})
    (tmp_path / "metadata.json").unlink()
    if text is not None:
        (tmp_path / "metadata.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_index(tmp_path)


def test_missing_metadata_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {})
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: No such file"):
        read_index(tmp_path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "", "a\0b"])
def test_bytes_outside_the_checkpoint_are_refused(tmp_path: Path, name: str) -> None:
    metadata = write_checkpoint(tmp_path, {"weight": grid((4,), (4,))})
    metadata.storage_data[MetadataIndex("weight", (0,))].relative_path = name
    write_metadata(tmp_path, metadata)
    with pytest.raises(UnsafeCheckpointError, match="outside the checkpoint"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("offset", -1), ("offset", "0"), ("length", None), ("length", 1.5), ("relative_path", 3), ("length", True)],
)
def test_a_field_of_a_wrong_type_is_damage(tmp_path: Path, field: str, value: Any) -> None:
    metadata = write_checkpoint(tmp_path, {"weight": grid((4,), (4,))})
    setattr(metadata.storage_data[MetadataIndex("weight", (0,))], field, value)
    write_metadata(tmp_path, metadata)
    with pytest.raises(CheckpointError, match=r"\.metadata is malformed"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    "metadata",
    [
        Metadata(None, storage_data={}),  # type: ignore[arg-type]
        Metadata({}, storage_data=None),
        Metadata({"weight": 1}, storage_data={}),  # type: ignore[dict-item]
        Metadata({}, storage_data={1: 2}),
        MetadataIndex("weight"),
    ],
)
def test_metadata_of_a_wrong_shape_is_damage(tmp_path: Path, metadata: object) -> None:
    write_checkpoint(tmp_path, {})
    write_metadata(tmp_path, metadata)
    with pytest.raises(CheckpointError, match=r"\.metadata is malformed"):
        read_index(tmp_path)


def test_metadata_that_names_nothing_is_damage(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {})
    write_metadata(tmp_path, Metadata({}, storage_data={}))
    with pytest.raises(CheckpointError, match=r"\.metadata names neither a tensor nor an object: it is damaged"):
        read_index(tmp_path)


def test_a_stream_transform_is_refused(tmp_path: Path) -> None:
    metadata = write_checkpoint(tmp_path, {"weight": grid((4,), (4,))})
    metadata.storage_data[MetadataIndex("weight", (0,))] = _StorageInfo("__0_0.distcp", 0, 9, ["zstd"])
    write_metadata(tmp_path, metadata)
    with pytest.raises(CheckpointError, match=r"weight is stored through transforms \['zstd'\]"):
        read_index(tmp_path)


def test_metadata_of_megatron_before_0_16_is_read(tmp_path: Path) -> None:
    metadata = write_checkpoint(tmp_path, {"weight": grid((4,), (4,))})
    data = pickle.dumps(metadata, protocol=2)
    assert data.count(b"torch.distributed.checkpoint.metadata\nMetadata\n") == 1
    old = b"megatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"
    (tmp_path / ".metadata").write_bytes(data.replace(b"torch.distributed.checkpoint.metadata\nMetadata\n", old))
    assert list(read_index(tmp_path).tensors) == ["weight"]


def test_bytes_of_nothing_are_named(tmp_path: Path) -> None:
    metadata = write_checkpoint(tmp_path, {"weight": grid((4,), (2,))})
    del metadata.state_dict_metadata["weight"].chunks[1]  # type: ignore[union-attr]
    write_metadata(tmp_path, metadata)
    assert read_index(tmp_path).unclaimed == ("weight at (2,)",)
