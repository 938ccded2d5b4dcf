"""Loads a torch_dist checkpoint under any layout without a collective: each rank reads what it needs.

This module reads every byte itself. Megatron-core opens no file of a checkpoint, because its readers trust their input.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from rl_safe_workers.checkpoint.folders.conversion_folder import find_megatron_weights
from rl_safe_workers.checkpoint.folders.manifest import (
    SHARDS,
    Manifest,
    check_files,
    check_fingerprint,
    read_manifest,
)
from rl_safe_workers.checkpoint.format.archives import Archive, read_pickle
from rl_safe_workers.checkpoint.format.gc_pause import gc_paused
from rl_safe_workers.checkpoint.format.index import (
    COMMON,
    ByteRange,
    CheckpointIndex,
    Chunk,
    TensorEntry,
    chunk_bytes,
    read_index,
)
from rl_safe_workers.checkpoint.format.rectangles import Index, uncovered
from rl_safe_workers.checkpoint.state.adapted_layers import layout_bound
from rl_safe_workers.checkpoint.state.layer_states import EXTRA_STATE, pickled, safe_layer_state
from rl_safe_workers.checkpoint.state.megatron import CONTENT_METADATA_KEY, StateFilling
from rl_safe_workers.checkpoint.state.model_state import model_state, restore_model
from rl_safe_workers.checkpoint.state.pieces import Piece, Split, coalesce, split
from rl_safe_workers.checkpoint.state.state import restore_state, sharded_state, state_digest
from rl_safe_workers.checkpoint.state.values import make_value
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError, RlSafeError
from rl_safe_workers.foreign_files import HOLE_BYTES, MALFORMED, described, open_foreign
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.worlds.training_rank import Part

logger = logging.getLogger(__name__)

OPEN_FILES = 32
"""Most files that a load keeps open: a checkpoint of a thousand ranks has a thousand files."""
LARGE_BYTES = 2**18
"""Parts of a piece are read one by one if they have this size or more, on average."""
LISTED = 10
"""Most keys that an error names."""
OURS_TO_IGNORE = ("rng_state/", "common_state/")
"""Key prefixes of objects that a load may leave unread: random states of another number of ranks, and the common
state."""
OBJECT_BYTES = 512 * 2**20
"""Largest object, or common state; a usual one has kilobytes."""
ENVELOPE_BYTES = 2**20
"""Most bytes of an archive beside a tensor's elements; torch.save needs a thousandth of this."""


def read_content_metadata(directory: Path) -> dict[str, Any] | None:
    """Returns the saver's record of how the state dict was made; None if there is none. Not collective.

    Raises:
        UnsafeCheckpointError: If the checkpoint asks for a name that no checkpoint needs; the message has it.
        CheckpointError: If it cannot be read.
    """
    with Blobs(directory) as blobs:
        index = None if (directory / COMMON).exists() else read_index(directory)
        found = blobs.load_common(index).get(CONTENT_METADATA_KEY)
    if not isinstance(found, dict | None):
        raise CheckpointError(f"{directory} describes its format by a {type(found).__name__}; use another checkpoint")
    return found


class Loader:
    """Loads of one rank. Every method is called by all ranks of the training world alike."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

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
            directory: Directory of the shards.
            timeout: Longest wait for each of the two agreements: that all keys are there, and that all ranks have read
                and restored their parts.
            restore: Puts what was loaded in place.
            strict: Whether a key that no rank asks for is an error. A missing key is always an error.

        Returns:
            The state dict with loaded tensors and objects instead of their descriptions, and the common state.

        Raises:
            CheckpointMismatchError: On every rank, with the missing and unexpected keys and shapes that differ.
            CheckpointError: On every rank, if one cannot read its part.
            PhaseTimeoutError: Naming the ranks that did not report in time.
        """
        operation, deadline = self._control.begin("load", phase=Phase.LOAD), Deadline.after(timeout)
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
        operation.gathering("ready").settle(
            deadline,
            failure=failure,
            report=(sorted(asked), complaint),
            decide=lambda reports: _check_fit(reports, index, strict),
            foreign=CheckpointError,
        )
        assert index is not None, "else the agreement has raised"
        loaded: dict[str, Any] = {}
        try:
            with Blobs(directory) as blobs:
                filling, common = StateFilling(state), blobs.load_common(index)
                loaded = filling.finish(common, _read_shards(filling.shards, index, blobs))
            restore(loaded)
        except RlSafeError as error:
            failure = error
        except Exception as error:
            failure = CheckpointError(f"{directory} cannot be loaded: {described(error)}")
            failure.__cause__ = error
        operation.gathering("read").settle(Deadline.after(timeout), failure=failure)
        return loaded


def compare(parts: Split, index: CheckpointIndex) -> str:
    """Names the shards of a rank that the checkpoint lacks or has in another shape; empty if it has them all."""
    # An extra state may be missing, as in a checkpoint of Megatron's local layers. The layer then starts as a new one.
    objects = {shard.unique_key for shard in parts.objects if EXTRA_STATE not in shard.unique_key}
    missing = objects - index.objects.keys()
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
    left_out = sorted(key for key in stored if key not in asked and not key.startswith(OURS_TO_IGNORE))
    # Local layers do not use the extra states of Transformer Engine's layers.
    unexpected = [key for key in left_out if EXTRA_STATE not in key]
    if unexpected and strict:
        complaints.append(f"unexpected: {_shorten(unexpected)}")
    elif unexpected:
        logger.warning("the checkpoint has %d keys that nobody asks for: %s", len(unexpected), _shorten(unexpected))
    if complaints:
        raise CheckpointMismatchError(f"the checkpoint does not fit the model: {'; '.join(dict.fromkeys(complaints))}")


def _shorten(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _read_shards(state: dict[str, Any], index: CheckpointIndex, blobs: Blobs) -> dict[str, Any]:
    """Returns the state dict with loaded tensors and objects instead of sharded ones."""
    parts = split(state)
    for shard in parts.tensors:
        if shard.data is None:
            shard.init_data("cpu", torch.zeros if shard.allow_shape_mismatch else torch.empty)
        elif shard.allow_shape_mismatch:
            shard.data.detach().zero_()
    read_pieces(parts.tensors, index, blobs)
    for item in parts.objects:
        key = item.unique_key
        if EXTRA_STATE not in key:
            item.data = blobs.load_object(index.objects[key], key)
        else:
            item.data = _layer_state(blobs.load_object(index.objects[key], key), key) if key in index.objects else None
    result: dict[str, Any] = _data_of(state)
    return result


def _layer_state(value: Any, key: str) -> Any:
    """Returns the extra state of a layer, made safe: it executes nothing when the layer unpickles it."""
    if isinstance(value, io.BytesIO):  # written by Transformer Engine before 2.0
        with TemporaryFile() as file:  # Archive reads by file descriptor
            size = file.write(value.getbuffer())
            file.flush()
            return pickled(load_value(Archive(file, 0, size, source=key))) if size else None
    return safe_layer_state(value, key)


def _data_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: _data_of(v) for k, v in state.items()}
    if isinstance(state, list):
        return [_data_of(v) for v in state]
    return state.data if isinstance(state, (ShardedTensor, ShardedObject)) else state


def load_value(archive: Archive) -> Any:
    """Loads the value in an archive of ``torch.save`` to host memory.

    Raises:
        UnsafeCheckpointError: If it asks for a name that no checkpoint needs; the message has the name.
        CheckpointError: If it is damaged, needs a class that is not installed here, or has too many parts.
    """
    try:
        with gc_paused():
            _check_byte_order(archive)
            value, storages = make_value(read_pickle(archive), archive.size)
            for record, storage in storages.items():
                if storage.numel():
                    archive.read_into(record, storage.numpy())
            return value
    except (*MALFORMED, RuntimeError, ImportError) as error:
        raise CheckpointError(
            f"{archive.source} cannot be read: it is damaged, or needs a class that is not installed here "
            f"({described(error)}); use another checkpoint"
        ) from error


def _check_byte_order(archive: Archive) -> None:
    if "byteorder" not in archive:
        return
    order = bytearray(min(archive.size("byteorder"), 16))
    archive.read_into("byteorder", order)
    if order != b"little":
        raise ValueError("its byte order is not little-endian")


class Blobs:
    """The files of a directory of shards, opened when they are first read from."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Blobs:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def load_object(self, place: ByteRange | None, key: str) -> Any:
        """Reads an object, which megatron-core stores in a list of its own.

        Raises:
            CheckpointError: If it is damaged.
            UnsafeCheckpointError: If it asks for a name that no checkpoint needs.
        """
        value = load_value(self._dense(self._archive(self._placed(place, key), key)))
        if not isinstance(value, list) or len(value) != 1:
            raise CheckpointError(f"{key} is no object of a checkpoint, but a {type(value).__name__}; use another one")
        return value[0]

    def load_common(self, index: CheckpointIndex | None) -> dict[str, Any]:
        """Reads the common state, which is the same on every rank: ``common.pt``, or the object that replaces it.

        Args:
            index: The checkpoint's index; None if it has ``common.pt``.

        Raises:
            CheckpointError: If there is neither, or it is damaged.
            UnsafeCheckpointError: If it asks for a name that no checkpoint needs.
        """
        if index is not None and index.common_object and not (self._directory / COMMON).exists():
            found = self.load_object(index.objects[index.common_object], index.common_object)
        else:
            file = self._opened(COMMON)
            size = os.fstat(file.fileno()).st_size
            found = load_value(self._dense(Archive(file, 0, size, source=str(self._directory / COMMON))))
        if not isinstance(found, dict):
            raise CheckpointError(f"{self._directory} has a {type(found).__name__} as common state; use another one")
        return found

    def load_tensor(self, chunk: Chunk, key: str, nbytes: int) -> torch.Tensor:
        """Reads a stored part of a tensor.

        Args:
            chunk: The part.
            key: Key of the tensor.
            nbytes: Size of its elements in bytes.

        Raises:
            CheckpointError: If it is damaged, or larger than the index says.
        """
        place = self._placed(chunk.place, key)
        if place.length > nbytes + ENVELOPE_BYTES:
            raise CheckpointError(f"{key} has {place.length} bytes for elements of {nbytes}; use another checkpoint")
        archive = self._archive(place, key)
        tensor = load_value(archive)
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != prod(chunk.sizes):
            raise CheckpointError(f"{archive.source} is no tensor of shape {list(chunk.sizes)}; use another one")
        return tensor.detach().view(chunk.sizes)

    def _placed(self, place: ByteRange | None, key: str) -> ByteRange:
        if place is None:
            raise CheckpointError(f"{key} has no place in any file of {self._directory}: the checkpoint is damaged")
        return place

    def _archive(self, place: ByteRange, key: str) -> Archive:
        where = f"{self._directory / place.file}, bytes {place.offset} to {place.stop}"
        return Archive(self._opened(place.file), place.offset, place.length, source=f"{key} in {where},")

    def _dense(self, archive: Archive) -> Archive:
        """Refuses an archive of an object that is too large or mostly a hole."""
        if archive.length > OBJECT_BYTES:
            raise CheckpointError(f"{archive.source} has {archive.length} bytes; use another one")
        if archive.hole_bytes > HOLE_BYTES:
            raise CheckpointError(f"{archive.source} is mostly a hole; use another checkpoint")
        return archive

    def _opened(self, name: str) -> BinaryIO:
        """Returns the open file. The key is the whole relative path: files in two folders may have one name."""
        file = self._files.pop(name, None)
        if file is None:
            try:
                file = open_foreign(self._directory / name, within=self._directory)
            except OSError as error:
                raise CheckpointError(f"{self._directory / name} cannot be read: {error.strerror}") from error
        self._files[name] = file  # last in order: the latest used
        if len(self._files) > OPEN_FILES:
            self._files.pop(next(iter(self._files))).close()
        return file


@torch.no_grad()
def read_pieces(tensors: Sequence[ShardedTensor], index: CheckpointIndex, blobs: Blobs) -> None:
    """Fills sharded tensors from the stored chunks that they overlap. Changes none if one cannot be filled.

    Raises:
        CheckpointError: If the chunks do not cover a tensor exactly once, or one is damaged.
    """
    data = [tensor.data for tensor in tensors]
    pieces = coalesce(tensors)
    found = [(piece, _covering(piece, index.tensors[piece.key])) for piece in pieces]
    reads = chain.from_iterable(_apart(piece, chunks, data, index.tensors[piece.key]) for piece, chunks in found)
    # In the order of the files: many ranks may have written parts of one tensor.
    for piece, chunks in sorted(reads, key=_first_place):
        target = piece.buffer(data)
        entry = index.tensors[piece.key]
        if _stored(piece, entry) != piece.shape:
            target.zero_()
        for chunk, there, here in chunks:
            target[here].copy_(blobs.load_tensor(chunk, piece.key, chunk_bytes(entry, chunk))[there])
        piece.scatter(data, target)


def _first_place(read: tuple[Piece, list[_Overlap]]) -> tuple[str, int]:
    places = [chunk.place for chunk, _, _ in read[1] if chunk.place is not None]
    return min(((place.file, place.offset) for place in places), default=("", 0))


def _apart(
    piece: Piece, chunks: list[_Overlap], data: Sequence[torch.Tensor], entry: TensorEntry
) -> Iterator[tuple[Piece, list[_Overlap]]]:
    """Yields what can be read at different times: each chunk of a piece, or each part that a chunk fills, or it all.

    Chunks of large experts are then read straight into their tensors, without a copy in between. Small ones go to a GPU
    together.
    """
    if piece.is_one_block(data) and _stored(piece, entry) == piece.shape:
        yield from ((piece, [chunk]) for chunk in chunks)
        return
    parts = {(part.start, part.shape): part for part in piece.parts}
    places = [(tuple(s.start for s in here), tuple(s.stop - s.start for s in here)) for _, _, here in chunks]
    is_large = piece.size_bytes >= LARGE_BYTES * len(parts)
    if not is_large or len(parts) == 1 or len(places) != len(parts) or not parts.keys() >= set(places):
        yield piece, chunks
        return
    for place, (chunk, there, _) in zip(places, chunks, strict=True):
        part = piece.alone(parts[place])
        yield part, [(chunk, there, tuple(map(slice, part.shape)))]


def _stored(piece: Piece, entry: TensorEntry) -> Index:
    """Shape of the part of a piece that the checkpoint has: all of it, unless the shard allows another global shape."""
    return tuple(
        max(0, min(size, whole - at)) for at, size, whole in zip(piece.offset, piece.shape, entry.shape, strict=True)
    )


def _covering(piece: Piece, entry: TensorEntry) -> list[_Overlap]:
    """Returns the chunks that overlap a piece, after a check that they cover it exactly once.

    Raises:
        CheckpointError: If they do not.
    """
    found = list(_overlaps(piece, entry.chunks))
    held = [(tuple(s.start for s in here), tuple(s.stop - s.start for s in here)) for _, _, here in found]
    for wrong in uncovered(held, _stored(piece, entry)):
        raise CheckpointError(
            f"{piece.key} {list(entry.shape)} is not whole: of {list(piece.shape)} at {list(piece.offset)}, {wrong}; "
            "use another checkpoint"
        )
    return found


_Overlap = tuple[Chunk, tuple[slice, ...], tuple[slice, ...]]
"""A chunk, and its overlap with a piece, as slices of the chunk and as slices of the piece."""


def _overlaps(piece: Piece, chunks: Iterable[Chunk]) -> Iterator[_Overlap]:
    """Yields chunks that overlap a piece."""
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


class CheckpointLoads(Part):
    """Loads checkpoints and conversions, saved under any layout, on the training world alone."""

    def load_checkpoint(
        self, path: str | Path, *, fingerprint: str, layout: Mapping[str, int], strict: bool = True
    ) -> Manifest:
        """Loads model, optimizer and random state, saved under any layout.

        Collective over: the training world, in phase ``load``, through the store. If the layout is not that of the
        save, the random state is not loaded and stays as the seed made it.

        Args:
            path: A ``global_step_N`` directory.
            fingerprint: Digest of this model's architecture.
            layout: This run's parallel sizes.
            strict: Whether keys of the checkpoint that no rank asks for are an error.

        Returns:
            The checkpoint's manifest, with the driver's state.

        Raises:
            CheckpointError: If the checkpoint is not complete or damaged, or this rank's state does not have the
                digest that was saved.
            CheckpointMismatchError: If it belongs to another model; the message names missing and unexpected keys.
            PhaseTimeoutError: If a trainer does not arrive in time; the message names it.
        """
        path = Path(path).absolute()
        found: list[Manifest] = []

        def describe() -> dict[str, Any]:
            manifest = read_manifest(path, looks_at_files=False)
            self._check_files(path, manifest)
            check_fingerprint(manifest, path=path, fingerprint=fingerprint)
            found.append(manifest)
            host = self.rank.host
            if manifest.layout != dict(layout) and (adapter := layout_bound(host.chunks)):
                raise CheckpointMismatchError(
                    f"{path} was saved under {manifest.layout} and cannot be loaded under {dict(layout)}: the order of "
                    f"the rows of {adapter} depends on tensor parallelism; take the layout of the save, or train with "
                    "LoRA in the place of CanonicalLoRA"
                )
            return sharded_state(
                host.chunks,
                host.optimizer,
                training_rank=self.rank.training_rank,
                size=self.rank.training_size,
                is_loading=True,
                metadata=read_content_metadata(path / SHARDS),
                rng=manifest.layout == dict(layout),
            )

        def restore(loaded: dict[str, Any]) -> None:
            restore_state(self.rank.host.chunks, self.rank.host.optimizer, loaded)
            if found[0].layout == dict(layout):
                self._check_digest(found[0], path)

        with self.rank.phase(Phase.LOAD):
            Loader(self.rank.control).load(
                describe, path / SHARDS, timeout=self.rank.remaining(), restore=restore, strict=strict
            )
        return found[0]

    def _check_files(self, path: Path, manifest: Manifest | None) -> None:
        """Checks on rank 0 that all files are there. If it fails there, the load fails on all ranks."""
        if manifest is not None and self.rank.training_rank == 0:
            check_files(path, manifest)

    def _check_digest(self, manifest: Manifest, path: Path) -> None:
        saved = manifest.digests.get(str(self.rank.training_rank))
        if saved is not None and (loaded := state_digest(self.rank.host.chunks, self.rank.host.optimizer)) != saved:
            raise CheckpointError(
                f"{path}: the state loaded on training rank {self.rank.training_rank} is not what was saved "
                f"(digest {loaded[:12]}, saved {saved[:12]})"
            )

    def load_model_weights(self, path: str | Path, *, fingerprint: str | None = None) -> None:
        """Loads only the model from a conversion or a training checkpoint, saved under any layout.

        Collective over: the training world, in phase ``load``. It updates the optimizer's copies of the parameters, and
        leaves the moments as they are.

        Args:
            path: A directory that `convert_checkpoint` or ``save_checkpoint`` made, or another program's torch_dist
                directory.
            fingerprint: Fingerprint of the HF directory that the weights must come from; None accepts any.

        Raises:
            CheckpointError: If it is no checkpoint, or not complete.
            CheckpointMismatchError: If it is of another model.
        """
        path = Path(path).absolute()
        with self.rank.phase(Phase.LOAD):
            weights = find_megatron_weights(path, looks_at_files=False)
            weights.check_is_of(fingerprint, path=path)

            def describe() -> dict[str, Any]:
                self._check_files(path, weights.manifest)
                return model_state(self.rank.host.chunks, read_content_metadata(weights.shards))

            # Not strict: a training checkpoint holds more than the model.
            Loader(self.rank.control).load(
                describe,
                weights.shards,
                timeout=self.rank.remaining(),
                restore=lambda loaded: restore_model(self.rank.host.chunks, self.rank.host.optimizer, loaded),
                strict=False,
            )
