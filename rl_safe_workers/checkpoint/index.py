"""What a torch_dist checkpoint holds and where: every tensor's chunks and every object, to the byte.

    index = read_index(Path("checkpoints/global_step_10"))
    index.tensors["decoder.final_layernorm.weight"].chunks[0].place     ByteRange(file='__0_0.distcp', ...)

It reads what we, verl, NeMo RL and Megatron-LM write through megatron-core 0.15 to 0.19, without torch.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from rl_safe_workers.checkpoint.collector import collector_paused
from rl_safe_workers.checkpoint.format_names import ITEM_BITS
from rl_safe_workers.checkpoint.manifest import SHARDS
from rl_safe_workers.checkpoint.manifest_facts import MANIFEST
from rl_safe_workers.checkpoint.rectangles import Index
from rl_safe_workers.checkpoint.unpickle import MALFORMED, Record, read_metadata_record
from rl_safe_workers.errors import CheckpointError, UnsafeCheckpointError, UsageError

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
    """None if the checkpoint does not say where it lies: it is damaged."""


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
    """Bytes that belong to no tensor or object of the checkpoint, described; a sound one has none."""

    @property
    def common_object(self) -> str | None:
        """Key of the object that takes the place of ``common.pt``; None if there is none."""
        return next((key for key in self.objects if key.startswith(COMMON_OBJECT)), None)


def locate(directory: Path) -> Location:
    """Finds a checkpoint: its root, its directory of shards, or a directory that holds one directory of shards.

    Raises:
        UsageError: If there is no such directory.
        CheckpointError: If it holds no checkpoint, or several; the message says what was looked for.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory; give that of a checkpoint")
    if (at := _at(directory)) is not None:
        return at
    found = [at for path in sorted(directory.iterdir()) if path.is_dir() and (at := _at(path)) is not None]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(at.root.name for at in found[:5])
        raise CheckpointError(f"{directory} holds {len(found)} checkpoints: give one of them ({names})")
    raise CheckpointError(
        f"{directory} holds no torch_dist checkpoint: looked for {MANIFEST} in it, and for {METADATA} and {FORMAT} "
        "in it and in the directories right below"
    )


def _at(directory: Path) -> Location | None:
    if (directory / MANIFEST).is_file():
        return Location(root=directory, shards=directory / SHARDS)
    if (directory / METADATA).is_file() or (directory / FORMAT).is_file():
        ours = directory.name == SHARDS and (directory.parent / MANIFEST).is_file()
        return Location(root=directory.parent if ours else directory, shards=directory)
    return None


def read_index(directory: Path) -> CheckpointIndex:
    """Reads a checkpoint's metadata; see `locate` for what the directory may be. Runs nothing that it asks for.

    Raises:
        UsageError: If there is no such directory.
        CheckpointError: If it holds no checkpoint, or one whose metadata is missing or malformed.
        UnsafeCheckpointError: If the metadata asks for a class that no checkpoint needs or a file outside.
    """
    location = locate(directory)
    read_format(location)
    return read_records(location)


def read_format(location: Location) -> Format:
    """Reads ``metadata.json``, which megatron-core writes last.

    Raises:
        CheckpointError: If it is missing, malformed or of another format.
    """
    path = location.shards / FORMAT
    try:
        fields = json.loads(path.read_bytes())
        found = Format(backend=fields["sharded_backend"], version=fields.get("sharded_backend_version", 1))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the save did not finish; take another checkpoint") from None
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}; take another checkpoint") from error
    if found.backend != "torch_dist" or found.version != 1:
        raise CheckpointError(
            f"{path} says format {found.backend!r} version {found.version!r}; only 'torch_dist' version 1 is read: "
            "save it again with --ckpt-format torch_dist"
        )
    return found


def read_records(location: Location) -> CheckpointIndex:
    """Reads ``.metadata``; see `read_index`."""
    with collector_paused():
        return _index(location, read_metadata_record(location.shards / METADATA))


def _index(location: Location, record: Record) -> CheckpointIndex:
    path = location.shards / METADATA
    try:
        fields = _fields(record, "Metadata", "MCoreMetadata")
        places, unclaimed = _places(fields["storage_data"], path)
        tensors: dict[str, TensorEntry] = {}
        objects: dict[str, ByteRange | None] = {}
        for key, described in _mapping(fields["state_dict_metadata"]).items():
            if type(described).__name__ == "BytesStorageMetadata":
                objects[_text(key)] = places.pop((key, None), None)
            else:
                tensors[_text(key)] = _tensor(key, _fields(described, "TensorStorageMetadata"), places)
    except MALFORMED as error:
        raise CheckpointError(f"{path} is malformed ({type(error).__name__}: {error}); take another one") from error
    unclaimed += [f"{key} at {offset}" for key, offset in places]
    return CheckpointIndex(location=location, tensors=tensors, objects=objects, unclaimed=tuple(unclaimed))


_INT = {int}
_Places = dict[tuple[str, Index | None], ByteRange]


def _places(storage: Any, path: Path) -> tuple[_Places, list[str]]:
    """Byte ranges by key and offset of the chunk, None for objects; and those that come twice, described."""
    places: _Places = {}
    twice: list[str] = []
    files: set[str] = set()
    for index, info in _mapping(storage).items():
        at, stored = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        if stored.get("transform_descriptors"):
            raise TypeError(f"{at['fqn']} is stored through transforms {stored['transform_descriptors']}")
        name = _text(stored["relative_path"])
        if name not in files:
            files.add(_inside(name, path))
        offset = at.get("offset")
        key = (_text(at["fqn"]), None if offset is None else _sizes(offset))
        place = ByteRange(name, _size(stored["offset"]), _size(stored["length"]))
        if places.setdefault(key, place) is not place:
            twice.append(f"{key[0]} at {key[1]} a second time")
    return places, twice


def _inside(name: str, path: Path) -> str:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise UnsafeCheckpointError(f"{path} places bytes in {name!r}, outside the checkpoint: refused")
    return name


def _tensor(key: str, fields: Mapping[str, Any], places: _Places) -> TensorEntry:
    chunks = []
    for chunk in fields["chunks"]:
        at = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(at["offsets"]), _sizes(at["sizes"])
        chunks.append(Chunk(offsets, sizes, places.pop((key, offsets), None)))
    # TensorProperties pickles as a tuple that starts with its dtype (torch's checkpoint/metadata.py:55).
    dtype = _fields(fields["properties"], "TensorProperties")["state"][0]
    return TensorEntry(dtype, ITEM_BITS[dtype] // 8, _sizes(fields["size"]), tuple(chunks))


def _fields(record: object, *kinds: str) -> dict[str, Any]:
    """The fields of a record of one of the kinds; a pickle may put anything anywhere."""
    if not isinstance(record, Record) or type(record).__name__ not in kinds:
        raise TypeError(f"{type(record).__name__} in the place of {kinds[0]}")
    return vars(record)


def _mapping(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} in the place of a dict")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} in the place of text")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} in the place of a size")
    return value


def _sizes(value: Any) -> Index:
    if type(value) is not tuple or not set(map(type, value)) <= _INT or min(value, default=0) < 0:
        raise ValueError(f"{value!r} in the place of sizes")
    return value


def chunk_bytes(entry: TensorEntry, chunk: Chunk) -> int:
    """Bytes of a chunk's elements, without the archive around them."""
    return prod(chunk.sizes) * entry.itemsize
