"""Slices: the bytes that a host needs, and a copy of those alone that loads."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS, read_manifest
from rl_safe_workers.checkpoint.format.index import ByteRange, CheckpointIndex, read_index
from rl_safe_workers.checkpoint.ranges import Needs, materialise, needed_ranges, sizes_of
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError
from tests.torch_dist import grid, write_checkpoint, write_metadata


@pytest.fixture
def index(tmp_path: Path) -> CheckpointIndex:
    """A checkpoint of ours with two tensors, in two files."""
    root = tmp_path / "global_step_3"
    cuts = {"weight": grid((8, 6), (2, 6)), "bias": grid((8,), (4,), torch.bfloat16)}
    write_checkpoint(root / SHARDS, cuts, objects=[f"rng_state/shard_{rank}_2" for rank in range(2)])
    files = {f"{SHARDS}/{path.name}": path.stat().st_size for path in (root / SHARDS).iterdir()}
    manifest = {"schema": 2, "step": 3, "layout": {}, "versions": {}, "model_fingerprint": "x", "saved_at": 0.0}
    manifest |= {"driver_state": {}, "digests": {}}
    records = {name: {"bytes": size, "digest": "crc32:00000000"} for name, size in files.items()}
    (root / MANIFEST).write_text(json.dumps({**manifest, "files": records}))
    return read_index(root)


def _load(shards: Path, place: ByteRange | None) -> torch.Tensor:
    assert place is not None
    with (shards / place.file).open("rb") as file:
        file.seek(place.offset)
        (shards / "one.pt").write_bytes(file.read(place.length))
    tensor: torch.Tensor = torch.load(shards / "one.pt", weights_only=True)
    return tensor


def test_only_the_touched_chunks_are_needed_and_the_small_files_whole(index: CheckpointIndex) -> None:
    ranges = needed_ranges(index, Needs(rectangles=[("weight", (1, 0), (2, 6))], objects=["rng_state/shard_1_2"]))
    chunks = index.tensors["weight"].chunks
    places = [chunks[0].place, chunks[1].place, index.objects["rng_state/shard_1_2"]]
    expected = sum(place.length for place in places if place)
    assert sum(stop - start for name in ranges if "distcp" in name for start, stop in ranges[name]) == expected
    for name in (f"{SHARDS}/common.pt", f"{SHARDS}/.metadata", f"{SHARDS}/metadata.json", MANIFEST):
        assert ranges[name] == [(0, (index.location.root / name).stat().st_size)]
    assert list(ranges)[-1] == MANIFEST


def test_neighbours_become_one_range(index: CheckpointIndex) -> None:
    everything = [("weight", (0, 0), (8, 6)), ("bias", (0,), (8,))]
    ranges = needed_ranges(index, Needs(rectangles=everything, objects=list(index.objects)))
    for file in ("__0_0.distcp", "__1_0.distcp"):
        size = (index.location.shards / file).stat().st_size
        assert ranges[f"{SHARDS}/{file}"] == [(0, size)]


def test_the_common_object_of_newer_megatron_is_always_needed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, objects=["common_state/shard_0_1"])
    (tmp_path / "common.pt").unlink()
    ranges = needed_ranges(read_index(tmp_path), Needs(rectangles=[]))
    assert sorted(ranges) == [".metadata", "__0_0.distcp", "metadata.json"]


def test_a_slice_holds_what_is_needed_and_zeros_elsewhere(index: CheckpointIndex, tmp_path: Path) -> None:
    ranges = needed_ranges(index, Needs(rectangles=[("weight", (2, 0), (2, 6))]))
    target = tmp_path / "slice"
    copied = materialise(index.location.root, target, ranges)
    assert copied == sum(stop - start for parts in ranges.values() for start, stop in parts)
    there = read_index(target)
    assert there.tensors == index.tensors
    place = index.tensors["weight"].chunks[1].place
    assert torch.equal(_load(there.location.shards, place), _load(index.location.shards, place))
    for name, parts in ranges.items():
        original, copy = (index.location.root / name).read_bytes(), (target / name).read_bytes()
        assert len(copy) == len(original)
        expected = bytearray(len(original))
        for start, stop in parts:
            expected[start:stop] = original[start:stop]
        assert copy == expected


def test_files_of_which_nothing_is_needed_are_holes_of_their_size(index: CheckpointIndex, tmp_path: Path) -> None:
    ranges = needed_ranges(index, Needs(rectangles=[]))
    assert [name for name, parts in ranges.items() if not parts] == [f"{SHARDS}/__{i}_0.distcp" for i in range(2)]
    materialise(index.location.root, tmp_path / "slice", ranges)
    assert read_manifest(tmp_path / "slice") == read_manifest(index.location.root)
    assert (tmp_path / "slice" / SHARDS / "__0_0.distcp").stat().st_blocks == 0


def test_a_slice_is_the_same_where_the_kernel_cannot_copy(
    index: CheckpointIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = needed_ranges(index, Needs(rectangles=[("bias", (0,), (1,))]))
    materialise(index.location.root, tmp_path / "a", ranges)

    def fail(*_: object) -> NoReturn:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "copy_file_range", fail)
    materialise(index.location.root, tmp_path / "b", ranges)
    for name in ranges:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_full_disk_is_an_error_of_ours(
    index: CheckpointIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        materialise(index.location.root, tmp_path / "slice", needed_ranges(index, Needs(rectangles=[])))
    assert not (tmp_path / "slice" / MANIFEST).exists() or not (tmp_path / "slice" / MANIFEST).read_bytes().strip(b"\0")


def test_a_target_that_is_not_empty_is_left_alone(index: CheckpointIndex, tmp_path: Path) -> None:
    (tmp_path / "slice").mkdir()
    (tmp_path / "slice" / "mine").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        materialise(index.location.root, tmp_path / "slice", {})


def test_a_source_that_is_too_short_is_refused(index: CheckpointIndex, tmp_path: Path) -> None:
    ranges = needed_ranges(index, Needs(rectangles=[("weight", (0, 0), (8, 6))]))
    os.truncate(index.location.shards / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has 100 bytes, but the checkpoint needs bytes up to"):
        materialise(index.location.root, tmp_path / "slice", ranges)


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (Needs(rectangles=[("other", (0,), (1,))]), "has no tensor other"),
        (
            Needs(rectangles=[("bias", (4,), (5,))]),
            r"bias has shape \[8\] in the checkpoint; \[5\] at \[4\] lies outside",
        ),
        (Needs(rectangles=[("bias", (0, 0), (1, 1))]), "lies outside"),
        (Needs(rectangles=[], objects=["rng_state/shard_7_8"]), "has no object rng_state/shard_7_8"),
    ],
)
def test_needs_that_the_checkpoint_does_not_have_are_refused(
    index: CheckpointIndex, needs: Needs, message: str
) -> None:
    with pytest.raises(CheckpointMismatchError, match=message):
        needed_ranges(index, needs)


def test_a_needed_chunk_without_a_place_is_damage(tmp_path: Path) -> None:
    metadata = write_checkpoint(tmp_path, {"weight": grid((4,), (2,))})
    metadata.storage_data.popitem()
    metadata.storage_data = dict(list(metadata.storage_data.items())[:1])
    write_metadata(tmp_path, metadata)
    with pytest.raises(CheckpointError, match="weight has no place"):
        needed_ranges(read_index(tmp_path), Needs(rectangles=[("weight", (0,), (4,))]))


@pytest.mark.timeout(20)
def test_nothing_outside_the_checkpoint_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "far").symlink_to("/etc/passwd")
    os.mkfifo(source / "fifo")
    for name, said in (("far", "a link that leads out"), ("fifo", "not a regular file"), ("gone", "No such file")):
        with pytest.raises(CheckpointError, match=said):
            materialise(source, tmp_path / f"target_{name}", {name: [(0, 1)]})
        with pytest.raises(CheckpointError, match=said):
            sizes_of(source, [name])


def test_a_hole_stays_a_hole_in_the_copy(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    size = 2**40
    with (tmp_path / "source" / "file").open("wb") as file:
        file.seek(2**30)
        file.write(b"data")
        file.truncate(size)
    materialise(tmp_path / "source", tmp_path / "target", {"file": [(0, size)]})
    copy = tmp_path / "target" / "file"
    assert (copy.stat().st_size, copy.stat().st_blocks < 1000) == (size, True)
    with copy.open("rb") as read:
        read.seek(2**30)
        assert read.read(6) == b"data\0\0"
