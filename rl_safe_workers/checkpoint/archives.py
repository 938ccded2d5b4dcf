"""The bytes of a checkpoint: digests of whole files, and checksums of the archives within a shard.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from rl_safe_workers.checkpoint.index import ByteRange

_BLOCK_BYTES = 4 * 2**20
_UNREADABLE = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    EOFError,
    NotImplementedError,
    OSError,
    RuntimeError,
    ValueError,
    struct.error,
    zlib.error,
)
"""What zipfile raises for a damaged archive: any field of it may hold anything."""


def crc32_of(path: Path) -> str:
    """Digest of a file as our manifests have it: ``"crc32:0a1b2c3d"``."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return f"crc32:{crc:08x}"


class _Slice(io.RawIOBase):
    """A byte range of an open file as a file of its own."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if at < 0:
            raise OSError(f"seek to {at}, before the start")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        block = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(block)
        return block


@contextmanager
def opened_range(directory: Path, place: ByteRange) -> Iterator[IO[bytes]]:
    """Opens the bytes of one archive.

    Raises:
        OSError: If the file cannot be opened.
    """
    with (directory / place.file).open("rb") as file:
        yield cast(IO[bytes], _Slice(file, place.offset, place.length))


def damaged_archives(path: Path, places: list[ByteRange]) -> Iterator[tuple[ByteRange, str]]:
    """Reads archives of one file through and yields those whose checksums do not fit, with what is wrong.

    What is between the records of an archive, headers and padding, has no checksum: a flipped bit there may go
    unnoticed, and so does it by torch.load.
    """
    with path.open("rb") as file:
        for place in sorted(places, key=lambda p: p.offset):
            if wrong := _check(_Slice(file, place.offset, place.length)):
                yield place, wrong


def _check(file: _Slice) -> str | None:
    try:
        with zipfile.ZipFile(cast(IO[bytes], file)) as archive:
            bad = archive.testzip()
    except _UNREADABLE as error:
        return f"is no archive of torch.save ({error})"
    return None if bad is None else f"does not have the bytes that were saved: checksum of {bad}"
