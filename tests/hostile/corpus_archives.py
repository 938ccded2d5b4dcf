"""Hostile archives: zip files in the place of what ``torch.save`` writes."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.hostile import pickles as p
from tests.hostile.case import Case, Site
from tests.hostile.checkpoints import OBJECT
from tests.hostile.corpus_checkpoints import checkpoint
from tests.torch_dist import write_metadata

GIB, MIB = 2**30, 2**20
ITERATION = pickle.dumps({"iteration": 7}, protocol=2)
Entries = list[tuple[str, bytes]]


def _zip(entries: Entries, compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in entries:
            file.writestr(name, data)
    return buffer.getvalue()


@cache
def _bomb(name: str, size: int) -> bytes:
    """A few MiB that inflate to GiB."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        if name != "archive/data.pkl":
            file.writestr(zipfile.ZipInfo("archive/data.pkl"), ITERATION)
        with file.open(name, "w", force_zip64=True) as entry:
            for _ in range(size // (16 * MIB)):
                entry.write(bytes(16 * MIB))
    return buffer.getvalue()


def _claiming(size: int) -> bytes:
    """An archive whose entry says that it has many more bytes than there are."""
    data = bytearray(_zip([("archive/data.pkl", ITERATION), ("archive/data/0", b"abcd")]))
    at = data.rindex(b"PK\x01\x02")
    data[at + 20 : at + 28] = struct.pack("<II", size, size)
    return bytes(data)


def _field(signature: bytes, offset: int, new: bytes) -> bytes:
    """An archive of which one field of a header is another."""
    data = bytearray(_zip([("archive/data.pkl", ITERATION), ("archive/data/0", b"abcd")]))
    at = data.rindex(signature) + offset
    data[at : at + len(new)] = new
    return bytes(data)


@cache
def _overlapping(count: int, size: int) -> bytes:
    """Many entries that all have the same bytes."""
    block = bytes(size)
    single = _zip([("archive/data.pkl", ITERATION), ("archive/x", block)])
    start = single.index(b"PK\x01\x02")
    second = single.index(b"PK\x01\x02", start + 4)
    end = single.index(b"PK\x05\x06")
    names = [f"{number:09}".encode() for number in range(count)]
    header = single[second:end]
    same = b"".join(header.replace(b"archive/x", name) for name in names)
    # The names differ from that in the local header, as the reader of a hostile file has to expect.
    directory = single[start:second] + same
    total = min(count + 1, 0xFFFF)
    tail = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, total, total, len(directory), start, 0)
    return single[:start] + directory + tail


def _same_name(count: int, size: int) -> bytes:
    """The same entry many times in the directory, under its own name."""
    single = _zip([("archive/data.pkl", ITERATION), ("archive/x", bytes(size))])
    start = single.index(b"PK\x01\x02")
    second = single.index(b"PK\x01\x02", start + 4)
    end = single.index(b"PK\x05\x06")
    directory = single[start:second] + single[second:end] * count
    tail = b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, count + 1, count + 1, len(directory), start, 0)
    return single[:start] + directory + tail


HOSTILE = pickle.dumps({"iteration": p.Runs(print, "ran")}, protocol=2)
ARCHIVES: dict[str, Callable[[], bytes]] = {
    "bomb-3gib-pickle": lambda: _bomb("archive/data.pkl", 3 * GIB),
    "bomb-3gib-entry": lambda: _bomb("archive/data/0", 3 * GIB),
    "two-roots": lambda: _zip([("p/data.pkl", ITERATION), ("q/data.pkl", HOSTILE)]),
    "p-z-and-q-z": lambda: _zip([("p/z", b"1"), ("q/z", b"2")]),
    "p-z-q-z-and-pickle": lambda: _zip([("p/z", b"1"), ("q/z", b"2"), ("p/data.pkl", ITERATION)]),
    "pickle-of-p-in-q": lambda: _zip([("p/z", b"1"), ("q/data.pkl", ITERATION), ("p/version", b"3\n")]),
    "pickle-twice": lambda: _same_entry(),
    "overlapping": lambda: _overlapping(2000, 8 * MIB),
    "overlapping-same-name": lambda: _same_name(2000, 8 * MIB),
    "many-entries": lambda: _zip([("archive/data.pkl", ITERATION), *((f"archive/{n}", b"") for n in range(60_000))]),
    "claims-2-gib": lambda: _claiming(2**31 - 1),
    "claims-4-gib": lambda: _claiming(2**32 - 2),
    "encrypted": lambda: _field(b"PK\x01\x02", 8, b"\x01\x00"),
    "unknown-compression": lambda: _field(b"PK\x01\x02", 10, b"\x63\x00"),
    "lzma-compression": lambda: _zip([("archive/data.pkl", ITERATION)], zipfile.ZIP_LZMA),
    "newer-version": lambda: _field(b"PK\x01\x02", 6, b"\xff\xff"),
    "offset-past-end": lambda: _field(b"PK\x01\x02", 42, b"\xf0\xff\xff\x7f"),
    "directory-past-end": lambda: _field(b"PK\x05\x06", 16, b"\xf0\xff\xff\x7f"),
    "name-past-end": lambda: _field(b"PK\x01\x02", 28, b"\xff\xff"),
    "name-with-escape": lambda: _zip([("archive/data.pkl", ITERATION), ("archive/\x1b[2J\n", b"x")]),
    "name-absolute": lambda: _zip([("/etc/data.pkl", ITERATION)]),
    "name-above": lambda: _zip([("../../data.pkl", ITERATION)]),
    "name-of-60000": lambda: _zip([("a" * 60_000 + "/data.pkl", ITERATION)]),
    "only-end": lambda: b"PK\x05\x06" + bytes(18),
    "pickle-missing-storage": lambda: p.archive(_tensor_of("0")),
    "storage-named-above": lambda: p.archive(_tensor_of("../../../outside/secret.txt")),
    "not-zip": lambda: pickle.dumps({"iteration": 7}),
    "old-torch-save": lambda: _old_format(),
    "tar": lambda: _tar(),
}
"""Archives by name; each is tried as ``common.pt``, as an object and as part of a tensor."""


def _same_entry() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", ITERATION)
        file.writestr(zipfile.ZipInfo("archive/Data.pkl"), HOSTILE)
    return buffer.getvalue().replace(b"archive/Data.pkl", b"archive/data.pkl")


def _tensor_of(storage: str) -> bytes:
    place = p.text("storage") + p.name("torch", "FloatStorage") + p.text(storage) + p.text("cpu") + p.whole(4)
    arguments = p.MARK + place + b"t" + p.BINPERSID + p.whole(0) + p.whole(4) + p.TUPLE1 + p.whole(1) + p.TUPLE1
    made = p.name("torch._utils", "_rebuild_tensor_v2") + p.MARK + arguments + b"\x89"
    return p.program(made + p.call("collections", "OrderedDict") + b"t" + p.REDUCE)


def _old_format() -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save({"iteration": 7}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _tar() -> bytes:
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name in ("storages", "tensors", "pickle"):
            info = tarfile.TarInfo(f"../../{name}")
            info.size = 4
            file.addfile(info, io.BytesIO(b"abcd"))
    return buffer.getvalue()


_SOUND = {
    "p-z-q-z-and-pickle",
    "lzma-compression",
    "name-of-60000",
    "many-entries",
    "overlapping-same-name",
    "overlapping",
}


def cases() -> Iterator[Case]:
    """All of them."""
    for name, make in ARCHIVES.items():
        # None is what torch.save writes: an audit may say so, or find that nothing in it is damaged.
        yield checkpoint(f"archive-{name}/common.pt", partial(_put_common, make), accepts=("index", *_lenient(name)))
        yield checkpoint(
            f"archive-{name}/object", partial(_put, make, OBJECT, None), accepts=("index", "common", "audit")
        )
        yield checkpoint(
            f"archive-{name}/tensor", partial(_put, make, "weight", (0, 0)), accepts=("index", "common", "audit")
        )


def _lenient(name: str) -> tuple[str, ...]:
    return ("audit", "common", "load") if name in _SOUND or "name" in name or "version" in name else ()


def _put_common(make: Callable[[], bytes], shards: Path, site: Site) -> None:
    (shards / "common.pt").write_bytes(make())


def _put(make: Callable[[], bytes], key: str, offset: tuple[int, ...] | None, shards: Path, site: Site) -> None:
    """Has the metadata say that an object, or a part of a tensor, is this archive."""
    metadata, data = FileSystemReader(shards).read_metadata(), make()
    path = shards / "__0_0.distcp"
    place = _StorageInfo(path.name, path.stat().st_size, len(data))
    with path.open("ab") as file:
        file.write(data)
    metadata.storage_data[MetadataIndex(key, offset)] = place
    write_metadata(shards, metadata)
