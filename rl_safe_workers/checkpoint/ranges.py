"""Slices: finds and copies the bytes that one host needs, so that nobody copies a checkpoint of terabytes to each.

    index = read_index(source)
    ranges = needed_ranges(index, Needs(rectangles=[("decoder.weight", (0, 0), (64, 128))], objects=[]))
    materialise(index.location.root, target, ranges)

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_safe_workers.checkpoint.folders.manifest_facts import MANIFEST, read_manifest_facts
from rl_safe_workers.checkpoint.format.index import (
    COMMON,
    FORMAT,
    METADATA,
    ByteRange,
    CheckpointIndex,
    TensorEntry,
)
from rl_safe_workers.checkpoint.format.rectangles import Index, Lookup, is_within
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError
from rl_safe_workers.foreign_files import data_extents, open_foreign

_BLOCK_BYTES = 8 * 2**20
_NO_KERNEL_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
"""Errors of ``copy_file_range`` if the file systems or the kernel cannot do it: this process then copies the bytes."""

Ranges = dict[str, list[tuple[int, int]]]
"""Sorted, disjoint ``(start, stop)`` in bytes by file, relative to the checkpoint's root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The parts of a checkpoint that one host reads."""

    rectangles: Sequence[tuple[str, Index, Index]]
    """``(key, offsets, sizes)`` of global tensors."""
    objects: Iterable[str] = ()
    """Unique keys, ``"rng_state/shard_0_2"``."""


def needed_ranges(index: CheckpointIndex, needs: Needs) -> Ranges:
    """Finds the bytes that a host needs: chunks that its rectangles touch, its objects, and what every load reads.

    A stored chunk is read as a whole, so it is needed as a whole.

    Returns:
        Ranges by file, in the order in which to copy. The manifest comes last, because it makes a directory a
        checkpoint. Files that the manifest lists and the host does not need have no range, but must have their size.

    Raises:
        CheckpointMismatchError: If the checkpoint has no such key, or a needed rectangle lies outside its tensor.
        CheckpointError: If a needed chunk has no place in any file, or a file is missing.
    """
    found: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    common = [index.common_object] if index.common_object else []
    for place in (*_chunks(index, needs.rectangles), *_objects(index, [*needs.objects, *common])):
        found[place.file].add((place.offset, place.stop))
    prefix = index.location.shards.relative_to(index.location.root)
    ranges = {str(prefix / file): _merge(parts) for file, parts in sorted(found.items())}
    if index.location.manifest is not None:
        for name in read_manifest_facts(index.location.root).files:
            ranges.setdefault(name, [])
    for small in [prefix / COMMON, prefix / METADATA, prefix / FORMAT, Path(MANIFEST)]:
        path = index.location.root / small
        if path.is_file():
            ranges.pop(str(small), None)  # to be the last in order
            ranges[str(small)] = [(0, path.stat().st_size)]
    return ranges


def _chunks(index: CheckpointIndex, rectangles: Iterable[tuple[str, Index, Index]]) -> Iterable[ByteRange]:
    by_key: defaultdict[str, set[tuple[Index, Index]]] = defaultdict(set)
    for key, offsets, sizes in rectangles:
        by_key[key].add((offsets, sizes))
    for key, needed in sorted(by_key.items()):
        entry = index.tensors.get(key)
        if entry is None:
            raise CheckpointMismatchError(f"{index.location.root} has no tensor {key}: it is of another model")
        yield from _touched(key, entry, needed)


def _touched(key: str, entry: TensorEntry, needed: Iterable[tuple[Index, Index]]) -> Iterable[ByteRange]:
    lookup = Lookup([(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
    for offsets, sizes in needed:
        if not is_within((offsets, sizes), entry.shape):
            raise CheckpointMismatchError(
                f"{key} has shape {list(entry.shape)} in the checkpoint; {list(sizes)} at {list(offsets)} lies outside"
            )
        for position in lookup.touching((offsets, sizes)):
            yield _placed(entry.chunks[position].place, key)


def _objects(index: CheckpointIndex, keys: Iterable[str]) -> Iterable[ByteRange]:
    for key in keys:
        if key not in index.objects:
            raise CheckpointMismatchError(f"{index.location.root} has no object {key}")
        yield _placed(index.objects[key], key)


def _placed(place: ByteRange | None, key: str) -> ByteRange:
    if place is None:
        raise CheckpointError(f"{key} has no place in any file of the checkpoint: run rl-safe audit on it")
    return place


def _merge(parts: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins ranges that overlap or touch.

    >>> _merge([(5, 9), (0, 2), (2, 4)])
    [(0, 4), (5, 9)]
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(parts):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def sizes_of(root: Path, names: Iterable[str]) -> dict[str, int]:
    """Returns the size in bytes of files of a checkpoint.

    Raises:
        CheckpointError: If one is missing, or no regular file of the checkpoint.
    """
    sizes = {}
    for name in names:
        try:
            with open_foreign(root / name, within=root) as file:
                sizes[name] = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise CheckpointError(f"{root / name} cannot be read: {error.strerror}; use another one") from error
    return sizes


def materialise(source: Path, target: Path, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> int:
    """Copies ranges into sparse files of full size, so that a load from the target finds each byte at its offset.

    Everything else in the files reads as zeros, so only the host with these needs can use the target. A load that
    needs other bytes fails, since no archive of ``torch.save`` is all zeros.

    Args:
        source: The checkpoint's root.
        target: A directory that is empty or does not exist yet.
        ranges: What `needed_ranges` returned.

    Returns:
        The number of bytes copied.

    Raises:
        CheckpointError: If the target is not empty, or a file cannot be copied or is shorter than its ranges.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        if next(target.iterdir(), None) is not None:
            raise CheckpointError(f"{target} is not empty: give a directory that does not exist yet")
        return sum(_copy(source / name, target / name, parts, root=source) for name, parts in ranges.items())
    except OSError as error:
        raise CheckpointError(f"{source} cannot be copied to {target}: {error}") from error


def _copy(source: Path, target: Path, parts: Sequence[tuple[int, int]], *, root: Path) -> int:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_foreign(source, within=root) as read, target.open("xb") as written:
        size = os.fstat(read.fileno()).st_size
        if parts and parts[-1][1] > size:
            raise CheckpointError(f"{source} has {size} bytes, but the checkpoint needs bytes up to {parts[-1][1]}")
        written.truncate(size)
        for start, stop in parts:
            for begin, until in data_extents(read, start, stop):  # a copied hole would take disk space
                _copy_range(read.fileno(), written.fileno(), begin, until)
        os.fsync(written.fileno())
    return sum(stop - start for start, stop in parts)


def _copy_range(source: int, target: int, start: int, stop: int) -> None:
    while start < stop:
        count = min(stop - start, _BLOCK_BYTES)
        try:
            copied = os.copy_file_range(source, target, count, start, start)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            copied = os.pwrite(target, os.pread(source, count, start), start)
        if copied == 0:
            raise CheckpointError(f"the source ended at byte {start} while it was copied: it is being changed")
        start += copied
