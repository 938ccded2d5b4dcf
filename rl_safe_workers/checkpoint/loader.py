"""Loads a torch_dist checkpoint under any layout without a collective: each rank reads what it needs."""

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_content_metadata
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed import Store

from rl_safe_workers.checkpoint.index import ByteRange, CheckpointIndex, Chunk, read_index
from rl_safe_workers.checkpoint.pieces import Piece, Split, coalesce, split
from rl_safe_workers.checkpoint.safe_reader import allowing_common
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.worlds.agreement import Agreement

logger = logging.getLogger(__name__)

OPEN_FILES = 32
"""Files that a load has open at once: a checkpoint of a thousand ranks has a thousand."""
LISTED = 10
"""Keys that an error names at most."""
OURS_TO_IGNORE = ("rng_state/", "common_state/")
"""Objects that a load may leave out: random states of another number of ranks, and what megatron-core reads itself."""


def read_content_metadata(directory: Path) -> dict[str, Any] | None:
    """How the state dict of a checkpoint was made, as whoever saved it wrote down; None if it did not. Not collective.

    Raises:
        UnsafeCheckpointError: If the checkpoint asks for a name that no checkpoint needs; the message has it.
        CheckpointError: If it cannot be read.
    """
    read_index(directory)  # refuses a hostile file before megatron-core opens it
    try:
        with allowing_common(directory):
            found: dict[str, Any] | None = load_content_metadata(str(directory))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{directory} cannot be read: {type(error).__name__}: {error}") from error
    return found


class Loader:
    """Loads of one rank. Every method is called by all ranks of the training world alike."""

    def __init__(self, store: Store, *, training_rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, training_rank, size
        self._loads = 0

    def load(
        self,
        describe: Callable[[], dict[str, Any]],
        directory: Path,
        *,
        timeout: timedelta,
        restore: Callable[[dict[str, Any]], None] = lambda loaded: None,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Reads what a sharded state dict asks for, in place where it has data.

        Collective over: the training world, through the store alone. Whatever fails on one rank fails on all.

        Args:
            describe: Makes Megatron's sharded state dict, for loading.
            directory: Of the shards.
            timeout: For each of the two agreements: that all is there, and that all has been read and restored.
            restore: Puts what was loaded in place.
            strict: Whether a key that no rank asks for is an error; one that is missing always is.

        Returns:
            The state dict with tensors and objects in the place of their descriptions, and the common state.

        Raises:
            CheckpointMismatchError: On every rank, with the missing and unexpected keys and shapes that differ.
            CheckpointError: On every rank, if one cannot read its part.
            PhaseTimeoutError: Naming the ranks that did not report in time.
        """
        # Counted in the store, which outlives a worker.
        self._loads = self._store.add(f"load/calls/{self._rank}", 1)
        failure: Exception | None = None
        state, index, asked, complaint = {}, None, set[str](), ""
        try:
            state = describe()
            index = read_index(directory)
            parts = split(state)
            complaint = compare(parts, index)
            asked = {s.key for s in parts.tensors} | {s.unique_key for s in parts.objects}
        except Exception as error:
            failure = error
        self._agreement("ready").settle(
            timeout,
            failure=failure,
            report=(sorted(asked), complaint),
            decide=lambda reports: _check_fit(reports, index, strict),
        )
        assert index is not None, "else the agreement has raised"
        loaded: dict[str, Any] = {}
        try:
            with allowing_common(directory):
                loaded = dist_checkpointing.load(
                    state,
                    str(directory),
                    sharded_strategy=_Strategy(index, directory),
                    validate_access_integrity=False,
                )
            restore(loaded)
        except Exception as error:
            failure = error
        self._agreement("read").settle(timeout, failure=failure)
        # Every rank has come to this agreement, so none waits for those before.
        self._agreement("ready").forget()
        self._agreement("read", self._loads - 1).forget()
        return loaded

    def _agreement(self, step: str, load: int | None = None) -> Agreement:
        subject = f"load/{self._loads if load is None else load}/{step}"
        return Agreement(self._store, subject, phase=Phase.LOAD, rank=self._rank, size=self._size)


def compare(parts: Split, index: CheckpointIndex) -> str:
    """Says what of a rank's shards the checkpoint does not have, or has in another shape; empty if it has them all."""
    missing = {shard.unique_key for shard in parts.objects} - index.objects.keys()
    other = set()
    for shard in parts.tensors:
        if shard.key not in index.tensors:
            missing.add(shard.key)
        elif not shard.allow_shape_mismatch and index.tensors[shard.key].shape != tuple(shard.global_shape):
            other.add(f"{shard.key} is {list(index.tensors[shard.key].shape)} there, {list(shard.global_shape)} here")
    complaints = [f"missing: {_shorten(sorted(missing))}"] if missing else []
    return "; ".join(complaints + ([f"of another shape: {_shorten(sorted(other))}"] if other else []))


def _check_fit(reports: Sequence[tuple[list[str], str]], index: CheckpointIndex | None, strict: bool) -> None:
    """Checks on rank 0 that the checkpoint has what all ranks ask for, and nothing else."""
    complaints = [complaint for _, complaint in reports if complaint]
    asked = {key for keys, _ in reports for key in keys}
    stored = [] if index is None else [*index.tensors, *index.objects]
    unexpected = sorted(key for key in stored if key not in asked and not key.startswith(OURS_TO_IGNORE))
    if unexpected and strict:
        complaints.append(f"unexpected: {_shorten(unexpected)}")
    elif unexpected:
        logger.warning("the checkpoint has %d keys that nobody asks for: %s", len(unexpected), _shorten(unexpected))
    if complaints:
        raise CheckpointMismatchError(f"the checkpoint does not fit the model: {'; '.join(dict.fromkeys(complaints))}")


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


class _Strategy(TorchDistLoadShardedStrategy):
    """Megatron-core's place for whoever reads the shards."""

    def __init__(self, index: CheckpointIndex, directory: Path) -> None:
        super().__init__()
        self._index, self._directory = index, directory

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any, *_: Any) -> dict[str, Any]:
        """Returns the state dict with tensors and objects in the place of sharded ones."""
        parts = split(sharded_state_dict)
        for shard in parts.tensors:
            if shard.data is None:
                shard.init_data("cpu", torch.zeros if shard.allow_shape_mismatch else torch.empty)
            elif shard.allow_shape_mismatch:
                shard.data.detach().zero_()
        with Blobs(self._directory) as blobs:
            read_pieces(parts.tensors, self._index, blobs)
            for item in parts.objects:
                item.data = blobs.load_object(self._index.objects[item.unique_key], item.unique_key)
        result: dict[str, Any] = _data_of(sharded_state_dict)
        return result


def _data_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: _data_of(v) for k, v in state.items()}
    if isinstance(state, list):
        return [_data_of(v) for v in state]
    return state.data if isinstance(state, (ShardedTensor, ShardedObject)) else state


class Blobs:
    """The files of a directory of shards, opened when they are first read from."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, IO[bytes]] = {}

    def __enter__(self) -> Blobs:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def load_object(self, place: ByteRange | None, key: str) -> Any:
        """Reads an object, which megatron-core stores in a list of its own."""
        (value,) = self._load(place, key)
        return value

    def load_tensor(self, chunk: Chunk, key: str) -> torch.Tensor:
        """Reads a stored part of a tensor."""
        tensor: torch.Tensor = self._load(chunk.place, key)
        return tensor.detach().view(chunk.sizes)

    def _opened(self, path: Path) -> IO[bytes]:
        file = self._files.pop(path.name, None) or path.open("rb")
        self._files[path.name] = file  # last in order: the latest used
        if len(self._files) > OPEN_FILES:
            self._files.pop(next(iter(self._files))).close()
        return file

    def _load(self, place: ByteRange | None, key: str) -> Any:
        if place is None:
            raise CheckpointError(f"{key} has no place in any file of {self._directory}: the checkpoint is damaged")
        path = self._directory / place.file
        try:
            file = self._opened(path)
            file.seek(place.offset)
            archive = io.BytesIO(file.read(place.length))
            _verify(archive)
            # Tensors and plain values only: a pickle that asks for anything else is refused.
            return torch.load(archive, map_location="cpu", weights_only=True)
        except Exception as error:
            where = f"{path}, bytes {place.offset} to {place.offset + place.length}"
            raise CheckpointError(f"{key} cannot be read from {where}: {type(error).__name__}: {error}") from error


def _verify(archive: io.BytesIO) -> None:
    """Compares the checksums that torch.save has left in its archive, which torch.load does not look at."""
    with zipfile.ZipFile(archive) as records:
        damaged = records.testzip()
    if damaged is not None:
        raise CheckpointError(f"the bytes are not what was saved: checksum of {damaged}")
    archive.seek(0)


@torch.no_grad()
def read_pieces(tensors: Sequence[ShardedTensor], index: CheckpointIndex, blobs: Blobs) -> None:
    """Fills sharded tensors from the stored chunks that they overlap."""
    data = [tensor.data for tensor in tensors]
    for piece in coalesce(tensors):
        target = piece.buffer(data)
        for chunk, there, here in _overlaps(piece, index.tensors[piece.key].chunks):
            target[here].copy_(blobs.load_tensor(chunk, piece.key)[there])
        piece.scatter(data, target)


def _overlaps(piece: Piece, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, tuple[slice, ...], tuple[slice, ...]]]:
    """Yields chunks that overlap a piece, with the overlap in the chunk and in the piece."""
    for chunk in chunks:
        there, here = [], []
        for c, n, p, m in zip(chunk.offsets, chunk.sizes, piece.offset, piece.shape, strict=True):
            start, stop = max(c, p), min(c + n, p + m)
            if start >= stop:
                break
            there.append(slice(start - c, stop - c))
            here.append(slice(start - p, stop - p))
        else:
            yield chunk, tuple(there), tuple(here)
