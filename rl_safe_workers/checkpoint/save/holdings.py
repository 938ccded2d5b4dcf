"""Compares holdings, the tensors and objects that each rank holds and writes, and makes the metadata from them.

The comparison comes before a save writes anything.
Training rank 0 keeps the holdings of all ranks. While no rank's digest changes, a save exchanges only digests.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rl_safe_workers.checkpoint.format.rectangles import Index
from rl_safe_workers.ranks import format_ranks


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that a rank holds, whole or in part."""

    key: str
    dtype: str
    """E.g. ``"torch.float32"``."""
    global_shape: Index
    chunks: list[tuple[Index, Index]]
    """Offset and shape of each part that this rank writes, in the order of its file; empty if replicas write it all."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Tensors and objects that one rank holds and writes. Its file has all chunks in order, then the objects."""

    entries: list[Entry]
    objects: list[str]
    """Unique keys of the objects that this rank writes."""

    def to_json(self) -> bytes:
        """Returns the holdings as bytes; equal holdings give equal bytes."""
        entries = [(entry.key, entry.dtype, entry.global_shape, entry.chunks) for entry in self.entries]
        return json.dumps([entries, self.objects]).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Holdings:
        """Inverse of `to_json`."""
        entries, objects = json.loads(data)
        return cls(
            [
                Entry(key, dtype, tuple(shape), [(tuple(offset), tuple(sizes)) for offset, sizes in chunks])
                for key, dtype, shape, chunks in entries
            ],
            objects,
        )

    def digest(self) -> str:
        """Digest of all keys, dtypes, shapes and places."""
        return hashlib.sha256(self.to_json()).hexdigest()


def find_mismatch(everyone: Sequence[Holdings]) -> str | None:
    """Compares the holdings of all ranks; describes the first key on which they disagree. None if there is none.

    Every rank must give a key the same dtype and global shape, and together they must write every element once.
    """
    holders: defaultdict[str, list[tuple[int, Entry]]] = defaultdict(list)
    for rank, holdings in enumerate(everyone):
        for entry in holdings.entries:
            holders[entry.key].append((rank, entry))
    for key in sorted(holders):
        if found := _disagreement(key, holders[key]) or _gap(key, holders[key]):
            return found
    return _doubled_object(everyone)


def _disagreement(key: str, held: Sequence[tuple[int, Entry]]) -> str | None:
    first_rank, first = held[0]
    for rank, entry in held[1:]:
        if (entry.dtype, entry.global_shape) != (first.dtype, first.global_shape):
            return (
                f"{key} is {entry.dtype} {list(entry.global_shape)} on training rank {rank} and "
                f"{first.dtype} {list(first.global_shape)} on training rank {first_rank}"
            )
    return None


def _gap(key: str, held: Sequence[tuple[int, Entry]]) -> str | None:
    """Finds elements that no rank writes, that two ranks write, or that are outside the tensor.

    A gap is not found if an overlap of the same size hides it. The audit finds both.
    """
    chunks = [(rank, offset, shape) for rank, entry in held for offset, shape in entry.chunks]
    global_shape, ranks = held[0][1].global_shape, format_ranks(sorted({rank for rank, _ in held}))
    writers: dict[Index, int] = {}
    for rank, offset, shape in chunks:
        if any(o < 0 or o + n > whole for o, n, whole in zip(offset, shape, global_shape, strict=True)):
            return f"{key}: training rank {rank} holds {list(shape)} at {list(offset)}, outside {list(global_shape)}"
        if writers.setdefault(offset, rank) != rank:
            return f"{key}: training ranks {writers[offset]} and {rank} would both write the part at {list(offset)}"
    written, whole = sum(prod(shape) for _, _, shape in chunks), prod(global_shape)
    if written == whole:
        return None
    return f"{key}: {written} of {whole} elements would be written (by what training rank {ranks} holds of it)"


def _doubled_object(everyone: Sequence[Holdings]) -> str | None:
    writers: dict[str, int] = {}
    for rank, holdings in enumerate(everyone):
        for key in holdings.objects:
            if key in writers:
                return f"object {key} would be written by training ranks {writers[key]} and {rank}"
            writers[key] = rank
    return None


def to_metadata(everyone: Sequence[Holdings]) -> Metadata:
    """Makes the metadata of a torch_dist checkpoint, without the places in the files."""
    tensors: dict[str, TensorStorageMetadata] = {}
    for holdings in everyone:
        for entry in holdings.entries:
            if entry.key not in tensors:
                dtype = getattr(torch, entry.dtype.removeprefix("torch."))
                tensors[entry.key] = TensorStorageMetadata(
                    properties=TensorProperties(dtype=dtype), size=torch.Size(entry.global_shape), chunks=[]
                )
            tensors[entry.key].chunks.extend(
                ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shape))
                for offset, shape in entry.chunks
            )
    objects = {key: BytesStorageMetadata() for holdings in everyone for key in holdings.objects}
    return Metadata(state_dict_metadata={**tensors, **objects})


def places(holdings: Holdings, file: str, lengths: Sequence[int], blobs: Sequence[int]) -> Mapping[MetadataIndex, Any]:
    """Returns the places of a rank's chunks and objects in its file, in the form of torch_dist's metadata.

    Args:
        holdings: The rank's holdings.
        file: Name of the file.
        lengths: Bytes of each chunk, then of each blob, one after another in the file.
        blobs: Index of the blob of each object; equal objects share one.
    """
    starts = [0, *accumulate(lengths)]
    found = {}
    chunks = [MetadataIndex(entry.key, torch.Size(offset)) for entry in holdings.entries for offset, _ in entry.chunks]
    for number, index in enumerate(chunks):
        found[index] = _StorageInfo(file, starts[number], lengths[number])
    for key, blob in zip(holdings.objects, blobs, strict=True):
        number = len(chunks) + blob
        found[MetadataIndex(key)] = _StorageInfo(file, starts[number], lengths[number])
    return found
