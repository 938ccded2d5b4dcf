"""Small torch_dist checkpoints, written with torch's own classes but without process groups or Megatron."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

Index = tuple[int, ...]
HEADER_BYTES = 1024
"""About what torch.save puts around a tensor."""


@dataclass
class Cut:
    """A global tensor and how it is cut into chunks ``(offsets, sizes)``."""

    shape: Index
    chunks: list[tuple[Index, Index]]
    dtype: torch.dtype = torch.float32


def grid(shape: Index, sizes: Index, dtype: torch.dtype = torch.float32) -> Cut:
    """A tensor cut into chunks of one size."""
    axes = [range(0, whole, size) for whole, size in zip(shape, sizes, strict=True)]
    return Cut(shape, [(offsets, sizes) for offsets in product(*axes)], dtype)


def archive(value: Any) -> bytes:
    """The bytes of ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class _Shards:
    """Appends blobs to the files of a checkpoint in turn; without contents, only makes room for them."""

    def __init__(self, directory: Path, *, files: int) -> None:
        self.directory = directory
        self.sizes = [0] * files
        self.next = 0
        for path in directory.glob("*.distcp"):
            path.unlink()

    def add(self, blob: bytes | int) -> _StorageInfo:
        number, self.next = self.next, (self.next + 1) % len(self.sizes)
        name, length = f"__{number}_0.distcp", blob if isinstance(blob, int) else len(blob)
        if isinstance(blob, bytes):
            with (self.directory / name).open("ab") as file:
                file.write(blob)
        self.sizes[number] += length
        return _StorageInfo(name, self.sizes[number] - length, length)

    def close(self) -> None:
        for number, size in enumerate(self.sizes):
            with (self.directory / f"__{number}_0.distcp").open("ab") as file:
                file.truncate(size)


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, Cut],
    *,
    objects: Iterable[str] = ("rng_state/shard_0_1",),
    common: Any = None,
    files: int = 2,
    contents: bool = True,
    values: Mapping[str, torch.Tensor] | None = None,
) -> Metadata:
    """Writes a checkpoint as megatron-core does, with random values for tensors that ``values`` lacks.

    Without ``contents``, its shards are holes of the right size.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards = _Shards(directory, files=files)
    described: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    items: list[WriteItem] = []
    for key, cut in tensors.items():
        described[key] = TensorStorageMetadata(TensorProperties(dtype=cut.dtype), torch.Size(cut.shape), [])
        for offsets, sizes in cut.chunks:
            chunk, index = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), MetadataIndex(key, offsets)
            described[key].chunks.append(chunk)
            place = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            value = values[key][place].clone() if values and key in values else torch.randn(sizes).to(cut.dtype)
            blob = archive(value) if contents else HEADER_BYTES + 8 * prod(sizes)
            storage[index] = shards.add(blob)
            data = TensorWriteData(chunk, TensorProperties(dtype=cut.dtype), torch.Size(cut.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    for key in objects:
        described[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = shards.add(archive([1, 2, 3]) if contents else HEADER_BYTES)
    shards.close()
    metadata = Metadata(described, storage_data=storage, storage_meta=StorageMeta(directory), version="1.0.0")
    metadata.all_local_plans = [SavePlan(items)]  # type: ignore[attr-defined]
    write_metadata(directory, metadata)
    torch.save({"iteration": 7} if common is None else common, directory / "common.pt")
    (directory / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    return metadata


def write_metadata(directory: Path, metadata: object) -> None:
    """Replaces ``.metadata``."""
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def experts(*, layers: int, count: int, hidden: int) -> dict[str, Cut]:
    """The inventory of a MoE model with its optimizer, one tensor per expert, as megatron-core writes it."""
    cuts: dict[str, Cut] = {}
    for state in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."):
        for name in ("fc1", "fc2"):
            shape = (layers, count, hidden, hidden)
            cuts[f"{state}decoder.layers.mlp.experts.{name}.weight"] = grid(shape, (1, 1, hidden, hidden))
        for name in ("input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.router"):
            cuts[f"{state}decoder.layers.{name}.weight"] = grid((layers, hidden, hidden), (1, hidden, hidden))
    return cuts
