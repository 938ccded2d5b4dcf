"""The bytes of a checkpoint: digests of whole files, and the records of archives of ``torch.save``.

Such an archive is a ZIP file of uncompressed records, one after another. Every other ZIP file is refused: it could
inflate to any size, or give two records the same bytes.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from rl_safe_workers.checkpoint.format.index import ByteRange
from rl_safe_workers.checkpoint.format.unpickle import read_tree
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_files import TEXT_CHARACTERS, data_extents, described, hole_bytes, open_foreign, printable

_BLOCK_BYTES = 4 * 2**20
_DIRECTORY_BYTES = 16 * 2**20
"""Largest table of contents of an archive: some hundred thousand records."""
PICKLE_BYTES = 16 * 2**20
"""Largest pickle of an archive, without the tensors. A usual one has kilobytes."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 1
_UNREADABLE = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    EOFError,
    LookupError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
)
"""Errors that zipfile raises for a damaged archive, in which any field may have any value."""


def crc32_of(path: Path, *, within: Path | None = None) -> str:
    """Digest of a file as our manifests have it: ``"crc32:0a1b2c3d"``.

    Raises:
        OSError: As `open_foreign`.
    """
    with open_foreign(path, within=within) as file:
        return f"crc32:{_crc_of(file, 0, os.fstat(file.fileno()).st_size):08x}"


def _crc_of(file: BinaryIO, start: int, stop: int) -> int:
    """CRC-32 of a byte range. It does not read holes: the effect of zeros follows from their number."""
    crc = 0
    for begin, until in data_extents(file, start, stop):
        crc = _after_zeros(crc, begin - start)
        for at in range(begin, until, _BLOCK_BYTES):
            crc = zlib.crc32(os.pread(file.fileno(), min(_BLOCK_BYTES, until - at), at), crc)
        start = until
    return _after_zeros(crc, stop - start)


def _after_zeros(crc: int, count: int) -> int:
    """Continues a CRC-32 over zeros. Each zero byte multiplies the register by x^8, so all of them by x^(8 * count)."""
    if not count:
        return crc
    power, base = 1 << 31, 1 << 23
    while count:
        if count & 1:
            power = _product(power, base)
        base, count = _product(base, base), count >> 1
    return _product(crc ^ 0xFFFFFFFF, power) ^ 0xFFFFFFFF


def _product(a: int, b: int) -> int:
    """Multiplies two polynomials modulo the CRC-32 polynomial; the highest bit is the constant term."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


class _Slice(io.RawIOBase):
    """A byte range of an open file, as a file for zipfile. Refuses a read larger than any table of contents."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

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
        size = left if size is None or size < 0 else min(size, left)
        if size > _DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"a table of contents of {size} bytes")
        block = os.pread(self._file.fileno(), size, self._start + self._at)
        self._at += len(block)
        return block


@dataclass(frozen=True, slots=True)
class _Entry:
    header: int
    """Offset of the record's header in the archive."""
    size: int
    limit: int
    """Offset of what follows the record."""
    crc: int


class Archive:
    """The records of one archive, by name, without the folder that all their names begin with.

    Raises:
        CheckpointError: In the constructor, if torch.save does not write such an archive.
    """

    def __init__(self, file: BinaryIO, offset: int, length: int, *, source: str) -> None:
        """Reads the table of contents.

        Args:
            file: The file, which stays open.
            offset: Offset of the archive in the file.
            length: Bytes of the archive.
            source: How errors name it.
        """
        self._file, self._offset, self.length, self.source = file, offset, length, source
        try:
            if offset + length > os.fstat(file.fileno()).st_size:
                raise EOFError("the file ends before it")
            with zipfile.ZipFile(cast(IO[bytes], _Slice(file, offset, length))) as archive:
                self._entries = _checked(archive.infolist(), archive.start_dir)
        except _UNREADABLE as error:
            raise CheckpointError(
                f"{source} is no archive of torch.save ({described(error)}); use another one"
            ) from error

    @property
    def hole_bytes(self) -> int:
        """Bytes of the archive that are holes."""
        return hole_bytes(self._file, self._offset, self._offset + self.length)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def size(self, name: str) -> int:
        """Bytes of a record.

        Raises:
            CheckpointError: If there is none of that name.
        """
        if name not in self._entries:
            raise CheckpointError(f"{self.source} has no record {_shown(name)}; use another one")
        return self._entries[name].size

    def checksum(self, name: str) -> int:
        """Returns the CRC-32 that the archive states for a record.

        Raises:
            CheckpointError: If there is none of that name.
        """
        self.size(name)
        return self._entries[name].crc

    def place(self, name: str) -> tuple[int, int]:
        """Returns the offsets in the file at which a record starts and stops.

        Raises:
            CheckpointError: If there is none of that name, or its header is damaged.
        """
        size, entry = self.size(name), self._entries[name]
        header = os.pread(self._file.fileno(), _LOCAL_HEADER.size, self._offset + entry.header)
        if len(header) == _LOCAL_HEADER.size:
            signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
            start = entry.header + _LOCAL_HEADER.size + name_bytes + extra_bytes
            if signature == b"PK\3\4" and start + size <= entry.limit:
                return self._offset + start, self._offset + start + size
        raise CheckpointError(f"{self.source} is damaged: record {_shown(name)} has no place; use another one")

    def read_into(self, name: str, buffer: Any) -> None:
        """Reads a record into a writable buffer of its size, and compares its checksum.

        Raises:
            CheckpointError: If the bytes do not have their checksum.
        """
        start, stop = self.place(name)
        rest = memoryview(buffer).cast("B")
        while start < stop and (count := os.preadv(self._file.fileno(), [rest], start)):
            start, rest = start + count, rest[count:]
        if start < stop or zlib.crc32(buffer) != self._entries[name].crc:
            raise CheckpointError(f"{self.source} does not have the bytes that were saved: checksum of {_shown(name)}")

    def damaged(self) -> str | None:
        """Returns the name of the first record whose bytes do not have its checksum; None if there is none."""
        for name, entry in self._entries.items():
            if _crc_of(self._file, *self.place(name)) != entry.crc:
                return name
        return None


def read_pickle(archive: Archive) -> Any:
    """Reads the pickle of an archive into the tree of `unpickle.read_tree`.

    Raises:
        UnsafeCheckpointError: If it asks for a name that no checkpoint needs; the message has the name.
        CheckpointError: If it is malformed or too large.
    """
    if (size := archive.size("data.pkl")) > PICKLE_BYTES:
        raise CheckpointError(f"{archive.source} holds a pickle of {size} bytes: use another one")
    data = bytearray(size)
    archive.read_into("data.pkl", data)
    return read_tree(bytes(data), source=archive.source)


def _shown(name: str) -> str:
    return printable(name[:TEXT_CHARACTERS])


def _checked(found: list[zipfile.ZipInfo], end: int) -> Mapping[str, _Entry]:
    """The entries by name.

    Raises:
        BadZipFile: If one is compressed, or shares its bytes or its name with another.
    """
    entries: dict[str, _Entry] = {}
    folders = set()
    limit = end
    for info in sorted(found, key=lambda info: info.header_offset, reverse=True):
        folder, _, name = info.filename.partition("/")
        folders.add(folder)
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.file_size != info.compress_size
            or info.flag_bits & _ENCRYPTED
        ):
            raise zipfile.BadZipFile("a record is compressed")
        if info.header_offset < 0 or info.header_offset + _LOCAL_HEADER.size + info.file_size > limit:
            raise zipfile.BadZipFile("records overlap")
        if name in entries or len(folders) > 1:
            raise zipfile.BadZipFile("two records have one name")
        entries[name] = _Entry(info.header_offset, info.file_size, limit, info.CRC)
        limit = info.header_offset
    return entries


def damaged_archives(path: Path, places: list[ByteRange], *, within: Path) -> Iterator[tuple[ByteRange, str]]:
    """Reads archives of one file and yields each one with a wrong checksum, and a description of the error.

    Headers and padding between the records have no checksum. A flipped bit there may go unnoticed, here and in
    torch.load. An archive that begins within another one is skipped, so that no byte is read twice.

    Raises:
        OSError: As `open_foreign`.
    """
    reach = 0
    with open_foreign(path, within=within) as file:
        for place in sorted(places, key=lambda p: p.offset):
            if place.offset < reach:
                continue
            reach = place.stop
            try:
                name = Archive(file, place.offset, place.length, source="").damaged()
            except CheckpointError as error:
                yield place, str(error).lstrip()
            else:
                if name is not None:
                    yield place, f"does not have the bytes that were saved: checksum of {_shown(name)}"
