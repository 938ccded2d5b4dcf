"""Pickles of a checkpoint: what the format needs comes back, and nothing else is run, imported or changed."""

from __future__ import annotations

import argparse
import copyreg
import enum
import io
import os
import pickle
import struct
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_safe_workers.checkpoint.format.index import read_index
from rl_safe_workers.checkpoint.format.unpickle import METADATA_NAMES, EnumMember, Record, read_metadata_record
from rl_safe_workers.checkpoint.load.loader import Blobs
from rl_safe_workers.errors import CheckpointError, UnsafeCheckpointError
from tests.hostile.pickles import Runs
from tests.torch_dist import grid, write_checkpoint


def _text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def _program(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


def _read(path: Path) -> Record:
    return read_metadata_record(path, within=path.parent)


METADATA_CLASS = _global("torch.distributed.checkpoint.metadata", "Metadata")


def _metadata(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / ".metadata"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("place", ["the whole", "a field", "a key"])
def test_metadata_that_calls_a_program_is_refused_by_name_and_not_run(
    tmp_path: Path, place: str, protocol: int
) -> None:
    hostile = Runs(os.system, f"touch {tmp_path / 'ran'}")
    metadata = write_checkpoint(tmp_path, {})
    metadata.planner_data = {hostile: 1} if place == "a key" else hostile
    path = _metadata(tmp_path, pickle.dumps(hostile if place == "the whole" else metadata, protocol=protocol))
    with pytest.raises(UnsafeCheckpointError, match=f"{path} asks for posix.system"):
        _read(path)
    with pytest.raises(UnsafeCheckpointError, match="posix.system"):
        read_index(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("builtins", "object"),
        ("builtins", "str"),
        ("builtins", "bytearray"),
        ("_codecs", "encode"),
        ("copyreg", "_reconstructor"),
        ("functools", "partial"),
        ("operator", "attrgetter"),
        ("torch", "load"),
        ("torch", "hub.load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.serialization", "load"),
        ("rl_safe_workers.checkpoint.format.unpickle", "os.system"),
    ],
)
def test_a_name_that_is_not_listed_is_refused(tmp_path: Path, module: str, name: str) -> None:
    path = _metadata(tmp_path, _program(_global(module, name)))
    with pytest.raises(UnsafeCheckpointError, match=f"asks for {module}.{name}, "):
        _read(path)


def test_getattr_gives_members_of_listed_enums_and_nothing_else(tmp_path: Path) -> None:
    kind = _global("torch.distributed.checkpoint.planner", "WriteItemType")
    call = _global("builtins", "getattr") + b"%s" + _text("SHARD") + b"\x86R"
    (member,) = _reduced(tmp_path, call % kind)
    assert isinstance(member, EnumMember)
    assert vars(member)["args"] == ("SHARD",)
    with pytest.raises(UnsafeCheckpointError, match="asks for builtins.getattr"):
        _reduced(tmp_path, call % METADATA_CLASS)


def _reduced(tmp_path: Path, body: bytes) -> tuple[Any, ...]:
    """Returns a program's result, as the arguments of a ``Metadata``."""
    record = _read(_metadata(tmp_path, _program(METADATA_CLASS + body + b"\x85R")))
    arguments: tuple[Any, ...] = vars(record)["args"]
    return arguments


@pytest.mark.parametrize("value", list(METADATA_NAMES.values()), ids=[".".join(name) for name in METADATA_NAMES])
def test_no_pickle_can_change_what_the_next_one_gets(value: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        value.__reduce_ex__ = None


def test_build_on_a_class_is_refused(tmp_path: Path) -> None:
    # BUILD with a state of (None, slots) sets attributes of whatever lies on the stack.
    change = METADATA_CLASS + b"N}" + _text("__init__") + b"Ns\x86b"
    with pytest.raises(CheckpointError, match="a pickle may not change Metadata"):
        _read(_metadata(tmp_path, _program(change)))


@pytest.mark.parametrize(
    "body",
    [
        b"\x8e" + struct.pack("<Q", 2**62),
        b"\x95" + struct.pack("<Q", 2**40),
        b"(" * 3 + b"u",
        b"",
        _text("a persistent id") + b"Q",
        b"\x82\x01",
        METADATA_CLASS + b"K\x01b",
    ],
    ids=["length", "frame", "stack", "empty", "persistent id", "extension", "state"],
)
def test_a_malformed_pickle_is_damage(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(CheckpointError, match="is damaged: it is not a pickle of a checkpoint"):
        _read(_metadata(tmp_path, _program(body)))


@pytest.fixture
def cached_extension() -> Iterator[int]:
    code = 240
    copyreg.add_extension("posix", "system", code)
    pickle.loads(b"\x80\x04\x82" + bytes([code]) + b".")  # an unrestricted reader caches what the code stands for
    yield code
    copyreg.remove_extension("posix", "system", code)


def test_an_extension_code_does_not_get_past_the_list(tmp_path: Path, cached_extension: int) -> None:
    path = _metadata(tmp_path, _program(b"\x82" + bytes([cached_extension])))
    with pytest.raises(UnsafeCheckpointError, match="posix.system"):
        _read(path)


def test_every_prefix_of_a_metadata_file_is_damage(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"weight": grid((4, 4), (2, 4))})
    whole = (tmp_path / ".metadata").read_bytes()
    for size in range(0, len(whole), 7):
        with pytest.raises(CheckpointError):
            _read(_metadata(tmp_path, whole[:size]))


class Fruit(enum.Enum):
    APPLE = 1


def _load_common(directory: Path) -> Any:
    with Blobs(directory) as blobs:
        return blobs.load_common(None)


def test_common_state_comes_back_as_what_it_was(tmp_path: Path) -> None:
    common = {
        "args": argparse.Namespace(
            lr=1e-3, dtype=torch.bfloat16, save=Path("/x"), names={"a"}, device=torch.device("cpu")
        ),
        "more": types.SimpleNamespace(count=np.float32(3), state=np.arange(3)),
        "tensor": torch.arange(4),
        "stream": io.BytesIO(b"abc").getvalue(),
    }
    torch.save(common, tmp_path / "common.pt")
    loaded = _load_common(tmp_path)
    assert loaded["args"] == common["args"]
    assert loaded["more"].count == 3
    assert np.array_equal(loaded["more"].state, np.arange(3))
    assert torch.equal(loaded["tensor"], torch.arange(4))
    assert loaded["stream"] == b"abc"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Runs(os.system, "false"), "posix.system"),
        (Runs(torch.load, "x"), "torch.serialization.load"),
        (Fruit.APPLE, ".Fruit"),
    ],
    ids=["os.system", "torch.load", "an unlisted enum"],
)
def test_common_state_that_asks_for_more_is_refused_by_name(tmp_path: Path, value: Any, name: str) -> None:
    torch.save({"args": value}, tmp_path / "common.pt")
    with pytest.raises(UnsafeCheckpointError, match=rf"common.pt.* asks for \S*{name}, which no checkpoint needs"):
        _load_common(tmp_path)


def test_a_common_file_that_is_no_archive_is_damage(tmp_path: Path) -> None:
    (tmp_path / "common.pt").write_bytes(pickle.dumps({"iteration": 1}))
    with pytest.raises(CheckpointError, match="no archive of torch.save"):
        _load_common(tmp_path)
    (tmp_path / "common.pt").unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        _load_common(tmp_path)
