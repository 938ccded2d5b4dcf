"""Calls megatron-core to store the common state, serialize objects and merge loaded state dicts as it does.

It looks at what the installed version does, not at its number. Up to 0.18 the common state becomes ``common.pt``
(strategies/common.py:42 in 0.16.1). From 0.19 on it becomes an object among the shards (serialization.py:431 in
0.19.2). A save here always writes the file, and with 0.19 the object too, so every version can read the checkpoint.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factory_merges, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8

from rl_safe_workers.checkpoint.format.index import COMMON
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_files import described

FORMAT = ("torch_dist", 1)
CONTENT_METADATA_KEY = "content_metadata"
"""dist_checkpointing/serialization.py:57."""


class _Capture(TorchDistSaveShardedStrategy):
    """A save strategy that keeps the state dict instead of writing it."""

    def __init__(self) -> None:
        super().__init__(*FORMAT)
        self.state: dict[str, Any] = {}

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *_: Any) -> AsyncRequest:
        self.state = sharded_state_dict
        return AsyncRequest(None, (), [])


def store_common(common: dict[str, Any], directory: Path, content_metadata: dict[str, Any]) -> list[ShardedObject]:
    """Lets megatron-core store the common state, which is the same on every rank. Not collective; for training rank 0.

    Args:
        common: The state dict without anything sharded.
        directory: Existing directory of the shards.
        content_metadata: How the sharded state dict was made, for the loader.

    Returns:
        Objects that the caller must write with the shards, beside ``common.pt``; none up to megatron-core 0.18.

    Raises:
        OSError: If ``common.pt`` cannot be written.
        CheckpointError: If this rank is not also rank 0 of the default group: megatron-core then stores nothing.
    """
    capture = _Capture()
    # Call it as an asynchronous save, because a synchronous one ends in a barrier.
    dist_checkpointing.save(
        dict(common),
        str(directory),
        sharded_strategy=capture,
        validate_access_integrity=False,
        async_sharded_save=True,
        content_metadata=dict(content_metadata),
    )
    objects = [v for v in capture.state.values() if isinstance(v, ShardedObject) and is_main_replica(v.replica_id)]
    if not objects and not (directory / COMMON).is_file():
        # Megatron-core stored nothing and said nothing (serialization.py:431, strategies/common.py:42). Nobody could
        # load the checkpoint.
        raise CheckpointError(
            f"training rank 0 is rank {dist.get_rank()} of the default group, so that megatron-core does not store the "
            "common state: the default group must be the training world (init_world or carve_world)"
        )
    if not (directory / COMMON).is_file():
        # Versions before 0.19 need the file; 0.19 reads either.
        torch.save({**common, CONTENT_METADATA_KEY: dict(content_metadata)}, directory / COMMON)
    return objects


def write_format(directory: Path) -> None:
    """Writes ``metadata.json``, by which megatron-core recognises its checkpoints. Training rank 0 calls it."""
    save_config(CheckpointingConfig(*FORMAT), str(directory))


def serialize_objects(objects: Iterable[ShardedObject]) -> tuple[list[str], list[int], list[bytes]]:
    """Serializes the objects that this rank writes, as megatron-core does. Serializes equal objects once.

    Transformer Engine has an extra state for each expert and matrix, thousands of them and nearly all alike.

    Returns:
        The unique keys, the index of the blob of each key, and the blobs.
    """
    by_key: defaultdict[str, list[Any]] = defaultdict(list)
    for item in objects:
        if is_main_replica(item.replica_id):
            by_key[item.unique_key].append(item.data)
    numbers: dict[bytes, int] = {}
    memory: dict[Any, bytes] = {}
    blobs = [numbers.setdefault(_serialize(data, memory), len(numbers)) for data in by_key.values()]
    return list(by_key), blobs, list(numbers)


def _serialize(data: list[Any], memory: dict[Any, bytes]) -> bytes:
    key = _identity(data)
    if key is None or key not in memory:
        buffer = io.BytesIO()
        # A list, as strategies/torch.py:325 makes it.
        torch.save(data, buffer)
        if key is None:
            return buffer.getvalue()
        memory[key] = buffer.getvalue()
    return memory[key]


def _identity(data: list[Any]) -> Any:
    """Returns a key that is equal for equal extra states; None for any other object."""
    (value,) = data if len(data) == 1 else (data,)
    if value is None:
        return "none"
    if isinstance(value, io.BytesIO):
        return "bytes", value.getvalue()
    if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.numel() < 2**16:
        return "tensor", tuple(value.shape), bytes(value.cpu().tolist())
    return None


class StateFilling:
    """Does what ``dist_checkpointing.load`` does with a state dict (serialization.py:62 to 180), but reads no file.

    Attributes:
        shards: The sharded part of the state dict, for the caller to read.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        """Takes Megatron's sharded state dict apart."""
        force_all_tensors_to_non_fp8(state)
        state, self._kept, self._factories = load_preprocess(state)
        self.shards, _ = extract_sharded_base(state)

    def finish(self, common: dict[str, Any], read: dict[str, Any]) -> dict[str, Any]:
        """Merges the common state and the shards into the state dict.

        Args:
            common: The common state of the checkpoint.
            read: `shards`, with loaded tensors and objects instead of their descriptions.

        Raises:
            CheckpointError: If the common state has a value where the state dict is sharded.
        """
        try:
            merge(common, self._kept)
            merge(common, read)
        except ValueError as error:
            raise CheckpointError(
                f"the common state of the checkpoint does not fit the model: {described(error)}"
            ) from error
        loaded: dict[str, Any] = apply_factory_merges(common, self._factories)
        return loaded
