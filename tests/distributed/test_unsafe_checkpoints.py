"""Loads of checkpoints that others wrote: what the format needs is read, and what asks for more is refused by name."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import signal
import zipfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from rl_safe_workers.checkpoint.folders.manifest import SHARDS
from rl_safe_workers.checkpoint.format.index import read_index
from rl_safe_workers.checkpoint.load.loader import read_content_metadata
from rl_safe_workers.errors import CheckpointError, UnsafeCheckpointError
from rl_safe_workers.platforms import cpu
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.ranks import Outcome, run_ranks, values
from tests.distributed.shards import SIZE, Saving, differences, emptied, state_of
from tests.distributed.worker import served_store

ARGS = argparse.Namespace(lr=np.float32(0.5), timeout=timedelta(minutes=5), params_dtype=torch.bfloat16)
"""As Megatron-LM keeps its arguments; the first two are on no list of megatron-core's own."""
COMMON = {"args": ARGS, "content_metadata": {"kind": "mine"}}


class Runs:
    """Pickles as a call of the shell."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.mark}",)


def _run(function: Any, *args: Any) -> list[Outcome]:
    with served_store() as address:
        return run_ranks(function, SIZE, address, *args)


def _save(rank: int, address: StoreAddress, root: Path) -> None:
    cpu.apply()
    Saving(rank, address).save(state_of(rank, step=1), root, step=1)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """The shards of a checkpoint of ours."""
    values(_run(_save, tmp_path))
    return tmp_path / "global_step_1" / SHARDS


def _load(rank: int, address: StoreAddress, shards: Path) -> tuple[Any, list[str]]:
    cpu.apply()
    loader = Saving(rank, address).loader
    loaded = loader.load(lambda: emptied(state_of(rank, step=1)), shards, timeout=timedelta(seconds=20), strict=False)
    wanted = state_of(rank, step=1)
    del wanted["args"], wanted["iteration"]
    return loaded["args"], differences(loaded, wanted)


def _read_format(rank: int, address: StoreAddress, shards: Path) -> Any:
    return read_content_metadata(shards)


def test_common_state_of_megatron_lm_is_loaded(shards: Path) -> None:
    torch.save(COMMON, shards / "common.pt")
    for args, different in values(_run(_load, shards)):
        assert args == ARGS
        assert different == []
    assert values(_run(_read_format, shards)) == [COMMON["content_metadata"]] * SIZE


def _make_common_hostile(shards: Path) -> None:
    torch.save({**COMMON, "more": Runs(shards / "ran")}, shards / "common.pt")


def _make_metadata_hostile(shards: Path) -> None:
    metadata = FileSystemReader(shards).read_metadata()
    metadata.planner_data = Runs(shards / "ran")
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("name", "make_hostile", "read"),
    [
        ("common.pt", _make_common_hostile, _load),
        ("common.pt", _make_common_hostile, _read_format),
        (".metadata", _make_metadata_hostile, _load),
    ],
)
def test_a_hostile_file_is_refused_by_name_on_every_rank_and_not_run(
    name: str, make_hostile: Callable[[Path], None], read: Any, shards: Path
) -> None:
    make_hostile(shards)
    for outcome in _run(read, shards):
        assert type(outcome.error) is UnsafeCheckpointError, outcome.trace
        assert f"{name} asks for posix.system, which no checkpoint needs" in str(outcome.error)
    assert not (shards / "ran").exists()


def _deflate(shards: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\x80\x02N." + bytes(10**8))
    _put_first(shards, stream.getvalue())


def _ask_for_a_program(shards: Path) -> None:
    stream = io.BytesIO()
    torch.save(Runs(shards / "ran"), stream)
    _put_first(shards, stream.getvalue())


def _put_first(shards: Path, data: bytes) -> None:
    """Puts an archive in the place of one that every rank reads."""
    place = read_index(shards).tensors["embedding"].chunks[0].place
    assert place is not None
    assert len(data) < 10**6
    metadata = FileSystemReader(shards).read_metadata()
    for index, info in metadata.storage_data.items():
        if index.fqn == "embedding":
            info.relative_path, info.offset, info.length = "hostile", 0, len(data)
    (shards / "hostile").write_bytes(data)
    (shards / ".metadata").write_bytes(pickle.dumps(metadata))


def _make_fifos(shards: Path) -> None:
    for path in shards.glob("*.distcp"):
        path.unlink()
        os.mkfifo(path)


def _change_an_enum(shards: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        body = b"csignal\nSignals\nK\x0f\x85R}X\x07\x00\x00\x00_value_K\x09sb"
        file.writestr("archive/data.pkl", b"\x80\x02" + body + b".")
    (shards / "common.pt").write_bytes(stream.getvalue())


def _load_and_look(rank: int, address: StoreAddress, shards: Path) -> tuple[str, str, int]:
    try:
        _load(rank, address, shards)
    except CheckpointError as error:
        return type(error).__name__, str(error), signal.SIGTERM.value
    raise AssertionError("it was loaded")


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        (_deflate, "a record is compressed"),
        (_ask_for_a_program, "asks for posix.system"),
        (_make_fifos, "not a regular file"),
        (_change_an_enum, "a state for a signal.Signals"),
    ],
)
def test_hostile_shards_are_refused_on_every_rank(attack: Callable[[Path], None], said: str, shards: Path) -> None:
    attack(shards)
    for kind, text, sigterm in values(_run(_load_and_look, shards)):
        assert kind in ("CheckpointError", "UnsafeCheckpointError")
        assert said in text
        assert text.isprintable()
        assert sigterm == signal.SIGTERM == 15
    assert not (shards / "ran").exists()
