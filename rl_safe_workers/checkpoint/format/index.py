"""The index of a torch_dist checkpoint: the place of every tensor's chunks and of every object, to the byte.

    index = read_index(Path("checkpoints/global_step_10"))
    index.tensors["decoder.final_layernorm.weight"].chunks[0].place     ByteRange(file='__0_0.distcp', ...)

It reads checkpoints that we, verl, NeMo RL and Megatron-LM write through megatron-core 0.15 to 0.20, without torch. A
child process with limits reads the pickle and returns plain JSON. This module then checks every field of the JSON.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from rl_safe_workers.bounded_child import Limits, call_bounded
from rl_safe_workers.checkpoint.folders.manifest import SHARDS
from rl_safe_workers.checkpoint.folders.manifest_facts import MANIFEST
from rl_safe_workers.checkpoint.format.format_names import ITEM_BITS
from rl_safe_workers.checkpoint.format.gc_pause import gc_paused
from rl_safe_workers.checkpoint.format.metadata_fields import fields_of, read_fields
from rl_safe_workers.checkpoint.format.rectangles import Index
from rl_safe_workers.errors import CheckpointError, UnsafeCheckpointError, UsageError
from rl_safe_workers.foreign_files import (
    MALFORMED,
    SMALL_BYTES,
    TEXT_CHARACTERS,
    described,
    hole_bytes,
    open_foreign,
    printable,
    read_foreign,
)

METADATA = ".metadata"
FORMAT = "metadata.json"
COMMON = "common.pt"
COMMON_OBJECT = "common_state/"
"""Key prefix of the object that megatron-core >= 0.19 writes in the place of ``common.pt`` (serialization.py:439)."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``[offset, offset + length)`` of a file."""

    file: str
    """Relative to the directory of shards."""
    offset: int
    length: int

    @property
    def stop(self) -> int:
        """Offset of the first byte after it."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangle of a global tensor, as one archive of ``torch.save``."""

    offsets: Index
    sizes: Index
    place: ByteRange | None
    """None if the checkpoint is damaged and does not say where the chunk lies."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A global tensor."""

    dtype: str
    """As torch names it: ``"bfloat16"``."""
    itemsize: int
    """Bytes per element."""
    shape: Index
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The contents of ``metadata.json``."""

    backend: str
    """``"torch_dist"``."""
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a checkpoint lies."""

    root: Path
    """Directory of our manifest; the directory of shards if there is none."""
    shards: Path
    """Directory of ``.metadata``."""

    @property
    def manifest(self) -> Path | None:
        """Path of our manifest; None for a checkpoint of someone else."""
        path = self.root / MANIFEST
        return path if path.is_file() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """Everything that a checkpoint says about itself."""

    location: Location
    tensors: Mapping[str, TensorEntry]
    """By key."""
    objects: Mapping[str, ByteRange | None]
    """By unique key, ``"rng_state/shard_0_2"``; None as in `Chunk`."""
    unclaimed: tuple[str, ...]
    """Descriptions of bytes that belong to no tensor or object. A sound checkpoint has none."""

    @property
    def common_object(self) -> str | None:
        """Key of the object that takes the place of ``common.pt``; None if there is none."""
        return next((key for key in self.objects if key.startswith(COMMON_OBJECT)), None)


def locate(directory: Path) -> Location:
    """Finds a checkpoint: its root, its directory of shards, or a directory that holds one directory of shards.

    Raises:
        UsageError: If there is no such directory.
        CheckpointError: If it holds no checkpoint, or several. The message says where the function looked, or names
            the checkpoints.
    """
    try:
        if not directory.is_dir():
            raise UsageError(f"{_shown(directory)} is not a directory; give that of a checkpoint")
        if (at := _at(directory)) is not None:
            return at
        inside = [path for path in sorted(directory.iterdir()) if path.is_dir() and _is_in(path, directory)]
        found = [at for path in inside if (at := _at(path)) is not None]
    except OSError as error:
        raise UsageError(
            f"{_shown(directory)} cannot be read: {error.strerror}; give the directory of a checkpoint"
        ) from error
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(_shown(at.root.name) for at in found[:5])
        raise CheckpointError(f"{_shown(directory)} holds {len(found)} checkpoints: give one of them ({names})")
    raise CheckpointError(
        f"{_shown(directory)} holds no torch_dist checkpoint: looked for {MANIFEST} in it, and for {METADATA} and "
        f"{FORMAT} in it and in the directories right below"
    )


def _shown(text: object) -> str:
    return printable(str(text)[:TEXT_CHARACTERS])


def _is_in(path: Path, directory: Path) -> bool:
    """Returns True if a path is not a link, or a link to a place within the directory. The search skips other links."""
    return not path.is_symlink() or path.resolve().is_relative_to(directory.resolve())


def _at(directory: Path) -> Location | None:
    if (directory / MANIFEST).is_file():
        return Location(root=directory, shards=directory / SHARDS)
    if (directory / METADATA).is_file() or (directory / FORMAT).is_file():
        ours = directory.name == SHARDS and (directory.parent / MANIFEST).is_file()
        return Location(root=directory.parent if ours else directory, shards=directory)
    return None


def read_index(directory: Path) -> CheckpointIndex:
    """Reads a checkpoint's metadata, and executes nothing from it. See `locate` for what the directory may be.

    Raises:
        UsageError: If there is no such directory.
        CheckpointError: If it holds no checkpoint, or if the metadata is missing, malformed, or takes more memory or
            time to read than its size justifies.
        UnsafeCheckpointError: If the metadata names a class that no checkpoint needs, or a file outside the checkpoint.
    """
    location = locate(directory)
    read_format(location)
    path = location.shards.absolute() / METADATA
    arguments = {"path": str(path), "root": str(location.root.absolute())}
    limits = limits_of(location)
    answer = call_bounded(read_fields, arguments, limits=limits, subject=_shown(path), failure=CheckpointError)
    with gc_paused():
        return _to_index(location, json.loads(answer))


def read_records(location: Location) -> CheckpointIndex:
    """As `read_index`, for a caller that is in a bounded child itself."""
    with gc_paused():
        return _to_index(location, fields_of(location.shards / METADATA, location.root))


def limits_of(location: Location) -> Limits:
    """Returns the limits for reading and checking a checkpoint's metadata: at least twice the need for its size.

    Raises:
        CheckpointError: If it is missing, or no regular file of the checkpoint.
    """
    path = location.shards / METADATA
    try:
        with open_foreign(path, within=location.root) as file:
            size = os.fstat(file.fileno()).st_size
            mib = (size - hole_bytes(file, 0, size)) / 2**20
    except OSError as error:
        raise CheckpointError(
            f"{_shown(path)} cannot be read: {error.strerror}; is this a torch_dist checkpoint?"
        ) from error
    cpu_s = 2 + int(mib * _CPU_S_PER_MIB)
    return Limits(
        memory_bytes=int((256 + mib * _MIB_PER_MIB) * 2**20),
        cpu_s=cpu_s,
        wall_s=30.0 + 10 * cpu_s,
        answer_bytes=int((1 + 2 * mib) * 2**20),
    )


_MIB_PER_MIB = 28
"""Memory limit per size of the metadata, twice the real need."""
_CPU_S_PER_MIB = 1.0


def read_format(location: Location) -> Format:
    """Reads ``metadata.json``, which megatron-core writes last.

    Raises:
        CheckpointError: If it is missing, malformed or of another format.
    """
    path = location.shards / FORMAT
    try:
        fields = json.loads(read_foreign(path, limit_bytes=SMALL_BYTES, within=location.root))
        found = Format(
            backend=_text(fields["sharded_backend"]), version=_size(fields.get("sharded_backend_version", 1))
        )
    except FileNotFoundError:
        raise CheckpointError(f"{_shown(path)} is missing: the save did not finish; use another checkpoint") from None
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{_shown(path)} cannot be read: {described(error)}; use another checkpoint") from error
    if found.backend != "torch_dist" or found.version != 1:
        raise CheckpointError(
            f"{_shown(path)} says format {_shown(found.backend[:_NAME_BYTES])!r} version {found.version!r}; "
            "only 'torch_dist' version 1 is read: save it again with --ckpt-format torch_dist"
        )
    return found


def _to_index(location: Location, fields: Any) -> CheckpointIndex:
    """Makes an index from the JSON of `metadata_fields`, in which any field may have any JSON type.

    Raises:
        UnsafeCheckpointError: If it places bytes outside the checkpoint.
        CheckpointError: If a field is not of its type.
    """
    path = location.shards / METADATA
    checked: set[str] = set()
    try:
        tensors = {
            _key(key): _tensor(dtype, shape, chunks, path, checked) for key, dtype, shape, chunks in fields["tensors"]
        }
        objects = {_key(key): _place(place, path, checked) for key, place in fields["objects"]}
    except MALFORMED as error:
        raise CheckpointError(f"{_shown(path)} is malformed ({described(error)}); use another one") from error
    if not tensors and not objects:
        raise CheckpointError(f"{_shown(path)} names neither a tensor nor an object: it is damaged; use another one")
    return CheckpointIndex(location=location, tensors=tensors, objects=objects, unclaimed=tuple(fields["unclaimed"]))


def _tensor(dtype: Any, shape: Any, chunks: Any, path: Path, checked: set[str]) -> TensorEntry:
    # Check all numbers of a tensor in one call: there may be a million.
    _check_sizes([shape, *(chunk[0] for chunk in chunks), *(chunk[1] for chunk in chunks)])
    return TensorEntry(
        _text(dtype),
        ITEM_BITS[dtype] // 8,
        tuple(shape),
        tuple(Chunk(tuple(offsets), tuple(sizes), _place(place, path, checked)) for offsets, sizes, place in chunks),
    )


def _place(place: Any, path: Path, checked: set[str]) -> ByteRange | None:
    if place is None:
        return None
    name, offset, length = place
    if name not in checked:
        checked.add(_inside(_text(name), path))
    return ByteRange(name, _size(offset), _size(length))


def _inside(name: str, path: Path) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise UnsafeCheckpointError(f"{_shown(path)} places bytes in {_shown(name)!r}, outside the checkpoint: refused")
    if not name.isprintable() or max(len(part.encode()) for part in parts) > _NAME_BYTES or len(name) > TEXT_CHARACTERS:
        raise ValueError("a name that no file of a checkpoint has")
    return name


_NAME_BYTES = 255
"""Longest name that file systems take."""
_DIMENSIONS = 64
"""As many as numpy has; torch has no limit."""
_LARGEST = 2**63 - 1


def _key(value: Any) -> str:
    if not _text(value).isprintable() or len(value) > TEXT_CHARACTERS:
        raise ValueError("a key that cannot be printed on a line")
    return str(value)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} in the place of text")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{type(value).__name__} in the place of a size")
    return value


def _check_sizes(lists: list[Any]) -> None:
    if not set(map(type, lists)) <= {list, tuple} or max(map(len, lists)) > _DIMENSIONS:
        raise TypeError("something else in the place of sizes")
    numbers = list(chain.from_iterable(lists))
    if not set(map(type, numbers)) <= {int} or min(numbers, default=0) < 0 or max(numbers, default=0) > _LARGEST:
        raise ValueError("something else in the place of a size")


def chunk_bytes(entry: TensorEntry, chunk: Chunk) -> int:
    """Bytes of a chunk's elements, without the archive around them."""
    return prod(chunk.sizes) * entry.itemsize
