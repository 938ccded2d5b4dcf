"""Writes one rank's shards into a torch_dist file, durably, with a digest of its bytes."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, cast

import torch

from rl_safe_workers.checkpoint.folders.durable import naming
from rl_safe_workers.checkpoint.folders.manifest import file_sizes
from rl_safe_workers.checkpoint.format.archives import crc32_of
from rl_safe_workers.control.deadline import Thread
from rl_safe_workers.errors import CheckpointError

DIGEST = "crc32"
"""CRC-32 detects damage that faulty hardware causes. Computing a stronger digest would take longer than a fast disk."""

_BUFFER_BYTES = 2**20
"""Size of the write buffer: torch.save writes a small tensor in some forty parts."""
_FLUSH_BYTES = 8 * 2**20
"""Bytes between two syncs in the background."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """Facts about a file that the commit needs."""

    name: str
    """Relative to the directory of the shards."""
    size_bytes: int
    digest: str
    """E.g. ``"crc32:0a1b2c3d"``."""
    lengths: list[int]
    """Bytes of each item, in the order written; each starts where the one before ends."""


class _DigestedFile:
    """A file for torch.save that counts and digests the bytes that it writes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size_bytes = 0
        self.crc = 0

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of the data."""
        block = memoryview(data).cast("B")
        self.crc = zlib.crc32(block, self.crc)
        self.size_bytes += len(block)
        return self._file.write(block)

    def flush(self) -> None:
        """Does nothing; the owner of the file closes it."""


@contextmanager
def _flushing(file: IO[bytes]) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of bytes written so far. A thread then syncs them, beside the body.

    So the disk starts to write before the last sync.

    Raises:
        OSError: If a sync failed. The kernel reports a failed write only once, so the last sync would not report it.
    """
    asked = SimpleQueue[bool]()
    flushed = 0
    failures: list[OSError] = []
    thread = Thread(_flush_when_asked, args=(file.fileno(), asked, failures), name="flush")

    def flush(size_bytes: int) -> None:
        nonlocal flushed
        if size_bytes - flushed >= _FLUSH_BYTES:
            flushed = size_bytes
            if not thread.is_alive():
                thread.start()
            if asked.empty():
                asked.put(True)

    try:
        yield flush
    finally:
        asked.put(False)
        if thread.is_alive():
            thread.join()
    if failures:
        raise failures[0]


def _flush_when_asked(descriptor: int, asked: SimpleQueue[bool], failures: list[OSError]) -> None:
    while asked.get() and not failures:
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            failures.append(error)


def write_items(path: Path, items: Iterable[torch.Tensor | bytes]) -> WrittenFile:
    """Writes tensors, each in torch.save's format, and serialized objects one after another, and syncs the file.

    It copies tensors on a device to the host one at a time. Copies, checksums and writes of large tensors release the
    interpreter's lock, so a thread can write beside a training step.

    Args:
        path: A file that does not exist yet.
        items: Contiguous tensors, and serialized objects as bytes.

    Raises:
        OSError: If the file cannot be written or made durable.
    """
    lengths: list[int] = []
    with naming(path), path.open("xb", buffering=_BUFFER_BYTES) as file, _flushing(file) as flush:
        digested = _DigestedFile(file)
        for item in items:
            start = digested.size_bytes
            if isinstance(item, torch.Tensor):
                torch.save(_alone(item), cast(Any, digested))
            else:
                digested.write(item)
            lengths.append(digested.size_bytes - start)
            flush(digested.size_bytes)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(
        name=path.name, size_bytes=digested.size_bytes, digest=f"{DIGEST}:{digested.crc:08x}", lengths=lengths
    )


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor on the host with a storage of its own: torch.save would write the whole storage of a view."""
    host = tensor.detach().cpu()
    storage = host.untyped_storage()
    if storage.nbytes() == host.nbytes:
        return host
    start = host.storage_offset() * host.itemsize
    # A slice of a storage shares its memory, and an offload can still resize the storage. After numpy() it could not.
    shared: torch.UntypedStorage = storage[start : start + host.nbytes]
    return host.new_empty(0).set_(shared, 0, host.shape, host.stride())


def file_records(directory: Path, written: Mapping[str, WrittenFile]) -> dict[str, dict[str, Any]]:
    """Returns size and digest of every file under a directory but its marker, in the manifest's form.

    Args:
        directory: The directory.
        written: Files that ranks have reported, by name. The function reads the others, which are few and small.

    Raises:
        CheckpointError: If a file that a rank has written is gone, or of another size.
    """
    records: dict[str, dict[str, Any]] = {}
    missing = dict(written)
    for name, size in file_sizes(directory).items():
        path = directory / name
        file = missing.pop(path.name, None)
        if file is not None and file.size_bytes != size:
            raise CheckpointError(f"{path} has {size} bytes, {file.size_bytes} were written: something else changed it")
        records[name] = {"bytes": size, "digest": crc32_of(path) if file is None else file.digest}
    if missing:
        raise CheckpointError(f"{', '.join(sorted(missing))} of {directory} were written, and are gone")
    return records
