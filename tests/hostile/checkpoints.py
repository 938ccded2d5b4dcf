"""A good checkpoint, small and always the same, from which hostile ones are made."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import signal
import tempfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta

from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS
from tests.hostile.case import Site
from tests.torch_dist import Cut, grid, write_checkpoint, write_metadata

CUTS = {
    "weight": grid((8, 6), (2, 3), torch.bfloat16),
    "uneven": Cut((4, 4), [((0, 0), (1, 4)), ((1, 0), (3, 1)), ((1, 1), (3, 3))]),
    "step": Cut((), [((), ())], torch.int64),
}
OBJECT = "state/shard_0_1"
STEP = 3
OURS, FOREIGN = f"checkpoints/global_step_{STEP}", f"iter_{STEP:07}"
"""Where the checkpoint lies below the input: as we have it, and as Megatron-LM has it."""
FILES = (".metadata", "metadata.json", "common.pt", "__0_0.distcp", "__1_0.distcp")
"""Files of a directory of shards."""
DATA = {"epoch": 0, "position": 1, "num_prompts": 4}
"""The driver's place in the prompts."""


def shards_of(root: str) -> str:
    """The directory of shards of `OURS` or `FOREIGN`."""
    return f"{root}/{SHARDS}" if root == OURS else root


def good_common() -> dict[str, Any]:
    """The common state, with what Megatron-LM keeps there."""
    # Here, not above: whoever only wants the names of the cases need not wait for Megatron.
    from megatron.core.transformer.enums import AttnBackend

    args = argparse.Namespace(
        lr=np.float32(0.5), dtype=torch.bfloat16, exit_signal=signal.SIGTERM, attention_backend=AttnBackend.auto
    )
    return {"iteration": 7, "args": args, "content_metadata": {"kind": "mine"}}


@cache
def _template() -> Path:
    """Makes the good checkpoint once a process, as Megatron-LM has it."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    shards = folder / "good"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        metadata = write_checkpoint(shards, CUTS, objects=(), common=good_common())
    add_object(shards, metadata, OBJECT, archive_of([{"seed": 7}]))
    # The one field with a path of this machine: all bytes are the same everywhere without it.
    metadata.storage_meta = StorageMeta("good")
    write_metadata(shards, metadata)
    return shards


def remove_template() -> None:
    """Removes what `put_checkpoint` copies from."""
    if _template.cache_info().currsize:
        shutil.rmtree(_template().parent)
        _template.cache_clear()


def archive_of(value: Any) -> bytes:
    """The bytes of ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def add_object(shards: Path, metadata: Metadata, key: str, blob: bytes) -> None:
    """Appends an object to the first file, and says so in metadata that is still to be written."""
    path = shards / "__0_0.distcp"
    offset = path.stat().st_size
    with path.open("ab") as file:
        file.write(blob)
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(key)] = _StorageInfo(path.name, offset, len(blob))


def put_checkpoint(site: Site, root: str) -> Path:
    """Puts the good checkpoint into an input, at `OURS` or `FOREIGN`; returns its directory of shards."""
    shards = site.input / shards_of(root)
    shutil.copytree(_template(), shards)
    if root == OURS:
        write_manifest(site.input / root)
    return shards


def write_manifest(root: Path, **changes: Any) -> None:
    """Writes a manifest that lists what is there, but for some fields."""
    (root / MANIFEST).write_text(json.dumps({**manifest_fields(root), **changes}, indent=1, sort_keys=True))


def manifest_fields(root: Path) -> dict[str, Any]:
    """The fields of a manifest that lists what is there."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != MANIFEST]
    files = {
        str(path.relative_to(root)): {
            "bytes": path.stat().st_size,
            "digest": f"crc32:{zlib.crc32(path.read_bytes()):08x}",
        }
        for path in paths
    }
    return {
        "schema": 2,
        "step": STEP,
        "model_fingerprint": "0123456789abcdef",
        "layout": {"world_size": 1, "tensor": 1},
        "saved_at": 1.7e9,
        "versions": {"torch": "2.13.0"},
        "files": files,
        "driver_state": {"data": DATA},
        "digests": {},
    }


def wanted_state() -> dict[str, Any]:
    """The state that a load asks the good checkpoint for, in Megatron's sharded form."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, torch.zeros(cut.shape, dtype=cut.dtype)) for key, cut in CUTS.items()
    }
    state["state"] = ShardedObject("state", None, (1,), (0,))
    return state
