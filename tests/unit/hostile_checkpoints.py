"""Checkpoints that were made to hurt the process that audits them."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from torch.distributed.checkpoint.metadata import MetadataIndex

from rl_safe_workers.checkpoint.format.unpickle import STEPS
from tests.torch_dist import grid, write_checkpoint, write_metadata

TIB = 2**40
LONGEST_S = 20.0
"""Five seconds on an idle machine; the tests share theirs."""
METADATA_CLASS = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
DOUBLED = b"K\x00" + b"2\x86" * 64
"""A tuple of two equal tuples of two equal tuples, 64 deep: to hash or print it takes for ever."""


def audit_in_child(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rl_safe_workers", "audit", str(directory), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert time.monotonic() - started_s < LONGEST_S
    return done


def program(directory: Path, body: bytes) -> None:
    (directory / ".metadata").write_bytes(b"\x80\x04" + body + b".")


def rename_key(directory: Path, key: str) -> None:
    metadata = write_checkpoint(directory, {key: grid((4,), (4,))})
    write_metadata(directory, metadata)


def place_in(directory: Path, name: str) -> None:
    metadata = write_checkpoint(directory, {"weight": grid((4,), (4,))})
    metadata.storage_data[MetadataIndex("weight", (0,))].relative_path = name
    write_metadata(directory, metadata)


def replace(directory: Path, name: str, make: Callable[[Path], object]) -> None:
    (directory / name).unlink()
    make(directory / name)


def hole(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.truncate(size)


def zip(records: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, data in records.items():
            file.writestr(f"archive/{name}", data)
    return stream.getvalue()


def common(directory: Path, body: bytes) -> None:
    (directory / "common.pt").write_bytes(zip({"data.pkl": b"\x80\x02" + body + b"."}))


ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a key of a lone surrogate": (lambda d: rename_key(d, "a\ud800"), "is malformed"),
    "a key that moves the cursor": (lambda d: rename_key(d, "a\x1b[2J\nb"), "is malformed"),
    "a file name of a lone surrogate": (lambda d: place_in(d, "\ud800"), "is malformed"),
    "a file name of 300 bytes": (lambda d: place_in(d, "x" * 300), "is malformed"),
    "an offset of 10000 digits": (
        lambda d: program(d, METADATA_CLASS + b"\x8b" + struct.pack("<I", 4200) + b"\x7f" * 4200 + b"\x85R"),
        "is malformed",
    ),
    "metadata that is a hole": (lambda d: replace(d, ".metadata", lambda p: hole(p, 8 * 2**30)), "mostly a hole"),
    "metadata that is this process's memory": (
        lambda d: replace(d, ".metadata", lambda p: p.symlink_to("/proc/self/mem")),
        "a link that leads out of",
    ),
    "metadata that is a FIFO": (lambda d: replace(d, ".metadata", os.mkfifo), "not a regular file"),
    "a format that is a FIFO": (lambda d: replace(d, "metadata.json", os.mkfifo), "not a regular file"),
    "a common file that is a FIFO": (lambda d: replace(d, "common.pt", os.mkfifo), "not a regular file"),
    "shards that are a FIFO": (lambda d: replace(d, "__0_0.distcp", os.mkfifo), "not a regular file"),
    "shards that are the kernel's log": (
        lambda d: replace(d, "__0_0.distcp", lambda p: p.symlink_to("/proc/kmsg")),
        "a link that leads out of",
    ),
    "shards elsewhere": (
        lambda d: replace(d, "__0_0.distcp", lambda p: p.symlink_to("/etc/passwd")),
        "a link that leads out of",
    ),
    "a link to itself": (lambda d: replace(d, "__0_0.distcp", lambda p: p.symlink_to(p.name)), "symbolic links"),
    "a hash without end": (
        lambda d: program(d, METADATA_CLASS + b"}" + DOUBLED + b"Ns\x85R"),
        "s of processor time",
    ),
    "a text without end": (lambda d: program(d, b"cbuiltins\nstr\n" + DOUBLED + b"\x85R"), "asks for builtins.str"),
    "a memo of gigabytes": (lambda d: program(d, b"Nr" + struct.pack("<I", 2**30)), "memory|MemoryError"),
    "bytes of exabytes": (lambda d: program(d, b"\x96" + struct.pack("<Q", 2**60)), "is damaged"),
    "a pickle of a crash": (lambda d: program(d, b"}" + b")" + b"\x85" * 10**6 + b"Ns"), "killed by SIGSEGV"),
    "a nest of lists": (lambda d: program(d, b"]" * 10**6), "is damaged|holds a"),
    "a format of a nest": (lambda d: (d / "metadata.json").write_text("[" * 10**5), "cannot be read"),
    "a format of a long number": (
        lambda d: (d / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist"})[:-1] + ', "sharded_backend_version": ' + "9" * 10**4 + "}"
        ),
        "cannot be read",
    ),
    "a format of a long name": (
        lambda d: (d / "metadata.json").write_text(json.dumps({"sharded_backend": "\x1b[2J" * 10**4})),
        "only 'torch_dist'",
    ),
    "a common file that asks for a hash without end": (lambda d: common(d, b"}" + DOUBLED + b"Ns"), "is damaged"),
    "a common file of many steps": (lambda d: common(d, b"]" * 10**7), f"more than {STEPS} steps"),
    "a common file that changes an enum": (
        lambda d: common(d, b"csignal\nSignals\n}X\x07\x00\x00\x00_value_K\x09sb"),
        "a state for a Name",
    ),
    "a common file that is a hole": (
        lambda d: replace(d, "common.pt", lambda p: hole(p, TIB)),
        "no archive of torch.save",
    ),
}
