"""Hostile metadata of well-formed pickles: names, places and shapes that no checkpoint has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.hostile.case import EITHER, Case, Site
from tests.hostile.checkpoints import FOREIGN, OBJECT
from tests.hostile.corpus_checkpoints import checkpoint, readers
from tests.hostile.grow import MANY_DIGITS, TEXTS, grow, numbers, texts, values
from tests.torch_dist import write_metadata

Change = Callable[[Metadata], object]
FIRST = MetadataIndex("weight", torch.Size((0, 0)))


def cases() -> Iterator[Case]:
    """All of them."""
    for word, (change, accepts) in CHANGES.items():
        yield checkpoint(f"metadata-{word}", partial(_change, change), accepts=accepts)
    for number, text in enumerate(TEXTS):
        # A name that is fine, such as a space, is that of a file that is not there.
        yield checkpoint(
            f"metadata-path/{number:02}",
            partial(_change, partial(_set, "relative_path", text)),
            accepts=("index", "common"),
        )
        yield checkpoint(f"metadata-key/{number:02}", partial(_change, partial(_rename, text)), accepts=EITHER)
    yield from _grown()


def _change(change: Change, shards: Path, site: Site) -> None:
    metadata = FileSystemReader(shards).read_metadata()
    change(metadata)
    write_metadata(shards, metadata)


def _set(field: str, value: Any, metadata: Metadata) -> None:
    setattr(metadata.storage_data[FIRST], field, value)


def _rename(key: str, metadata: Metadata) -> None:
    metadata.state_dict_metadata[key] = metadata.state_dict_metadata.pop("weight")
    for index in [index for index in metadata.storage_data if index.fqn == "weight"]:
        metadata.storage_data[MetadataIndex(key, index.offset)] = metadata.storage_data.pop(index)


def _tensor(chunks: list[tuple[Any, Any]], size: Any, key: str = "weight") -> Change:
    """Gives a tensor other chunks, each with a place."""

    def change(metadata: Metadata) -> None:
        entry = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), size, [])
        for number, (offsets, sizes) in enumerate(chunks):
            entry.chunks.append(ChunkStorageMetadata(offsets, sizes))
            index = MetadataIndex(key)
            object.__setattr__(index, "offset", offsets)  # its own constructor takes no hostile ones
            metadata.storage_data[index] = _StorageInfo("__0_0.distcp", 10 * number, 10)
        metadata.state_dict_metadata[key] = entry

    return change


def _objects(count: int) -> Change:
    def change(metadata: Metadata) -> None:
        for number in range(count):
            metadata.state_dict_metadata[f"o/{number}"] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(f"o/{number}")] = _StorageInfo("__0_0.distcp", 0, 10**12)

    return change


def _crossing(count: int) -> list[tuple[Any, Any]]:
    """Rows that are open all at once for a sweep along the first axis, and disjoint along the second."""
    return [((number, 2 * number), (10 * count, 1)) for number in range(count)]


NOT_LOADED = ("index", "common")
CHANGES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "offset-digits": (partial(_set, "offset", MANY_DIGITS), NOT_LOADED),
    "offset-1e18": (partial(_set, "offset", 10**18), NOT_LOADED),
    "offset-2-to-the-63": (partial(_set, "offset", 2**63), NOT_LOADED),
    "length-1e18": (partial(_set, "length", 10**18), NOT_LOADED),
    "length-2-to-the-63": (partial(_set, "length", 2**63), NOT_LOADED),
    "length-digits": (partial(_set, "length", MANY_DIGITS), NOT_LOADED),
    "length-8-gib": (partial(_set, "length", 2**33), NOT_LOADED),
    "length-zero": (partial(_set, "length", 0), NOT_LOADED),
    "path-above": (partial(_set, "relative_path", "../../outside/secret.txt"), ("common",)),
    "path-folder": (partial(_set, "relative_path", "."), NOT_LOADED),
    "path-metadata": (partial(_set, "relative_path", ".metadata"), (*NOT_LOADED, "audit")),  # reads no bytes
    "path-long": (partial(_set, "relative_path", "a" * 300), NOT_LOADED),
    "path-deep": (partial(_set, "relative_path", "a/" * 5_000 + "a"), NOT_LOADED),
    "transforms": (partial(_set, "transform_descriptors", ["\x1b[2J\ud800"]), ("common",)),
    "many-dimensions": (_tensor([((0,) * 5_000, (1,) * 5_000)], (2,) * 5_000), NOT_LOADED),
    "huge-dimensions": (_tensor([((0, 0), (1, 1))], (2**62, 2**62)), NOT_LOADED),
    "dimensions-of-digits": (_tensor([((0, 0), (MANY_DIGITS, 1))], (MANY_DIGITS, 1)), NOT_LOADED),
    "chunk-outside-of-digits": (_tensor([((MANY_DIGITS, 0), (1, 1))], (8, 6)), NOT_LOADED),
    "chunk-of-other-dimensions": (_tensor([((0,), (1, 1, 1))], (8, 6)), NOT_LOADED),
    "no-chunks": (_tensor([], (8, 6)), NOT_LOADED),
    "scalar-with-chunks": (_tensor([((), ()), ((0,), (1,))], ()), NOT_LOADED),
    "crossing-rows": (_tensor(_crossing(20_000), (10**6, 10**6), "extra"), NOT_LOADED),
    "equal-rows": (_tensor([((0, n), (4, 10**6)) for n in range(20_000)], (8, 10**7), "extra"), NOT_LOADED),
    "many-slices": (_tensor([((n,), (1,)) for n in range(100_000)], (100_000,), "extra"), NOT_LOADED),
    "many-objects": (_objects(50_000), NOT_LOADED),
    "two-commons": (lambda m: _rename_object("common_state/shard_0_1", m), EITHER),
    "same-place-for-all": (lambda m: [_overlap(m)], NOT_LOADED),
    "object-as-tensor": (lambda m: m.state_dict_metadata.update({OBJECT: m.state_dict_metadata["weight"]}), NOT_LOADED),
    "tensor-as-object": (lambda m: m.state_dict_metadata.update(weight=BytesStorageMetadata()), NOT_LOADED),
    "dtype-text": (lambda m: setattr(_properties(m), "dtype", "float32"), EITHER),  # the stored tensor's own counts
    "dtype-none": (lambda m: setattr(_properties(m), "dtype", None), ("common",)),
    "dtype-other": (lambda m: setattr(_properties(m), "dtype", torch.complex128), EITHER),
    "state-list": (lambda m: setattr(m, "state_dict_metadata", []), ("common",)),
    "storage-list": (lambda m: setattr(m, "storage_data", [1]), ("common",)),
    "storage-none": (lambda m: setattr(m, "storage_data", None), ("common",)),
}


def _properties(metadata: Metadata) -> Any:
    entry: Any = metadata.state_dict_metadata["weight"]
    return entry.properties


def _rename_object(key: str, metadata: Metadata) -> None:
    metadata.state_dict_metadata[key] = metadata.state_dict_metadata.pop(OBJECT)
    metadata.storage_data[MetadataIndex(key)] = metadata.storage_data.pop(MetadataIndex(OBJECT))


def _overlap(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.relative_path, info.offset = "__0_0.distcp", 0


def _grown() -> Iterator[Case]:
    commands = tuple(readers(FOREIGN, audits=(("--deep", "--json"),)))
    fields = st.one_of(
        st.tuples(st.just("relative_path"), texts()),
        st.tuples(st.sampled_from(("offset", "length")), numbers()),
        st.tuples(st.sampled_from(("offset", "length", "relative_path", "transform_descriptors")), values()),
    )
    for number, (field, value) in enumerate(grow(fields, 60, seed=31)):
        yield checkpoint(
            f"metadata-place/{number:03}",
            partial(_change, partial(_set, field, value)),
            commands=commands,
            accepts=EITHER,
        )
    sizes = st.lists(st.integers(-2, 9), max_size=3).map(tuple)
    tensors = st.tuples(st.lists(st.tuples(sizes, sizes), max_size=5), sizes)
    for number, (chunks, size) in enumerate(grow(tensors, 60, seed=32)):
        yield checkpoint(
            f"metadata-tensor/{number:03}", partial(_change, _tensor(chunks, size)), commands=commands, accepts=EITHER
        )
