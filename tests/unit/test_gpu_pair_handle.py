"""The handle of a pair's GPU memory, as another process sends it."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.worlds.gpu_pair import map_memory

SIZE = 1024
GPU = torch.device("cuda", 0)
GOOD: dict[str, Any] = {
    "handle": "00" * 65,
    "size": SIZE,
    "offset": 0,
    "counter": b"/torch_12_345_0".hex(),
    "counter_offset": 0,
    "event": "00" * 64,
    "waits_for_event": True,
}


class Runs:
    """Pickles as a call of the shell."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture(autouse=True)
def never_reaches_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def reach(*args: object) -> None:
        raise AssertionError("CUDA was asked to map what is not ours")

    monkeypatch.setattr(torch.cuda, "init", reach)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    for text in (pickle.dumps(Runs(tmp_path / "ran")), pickle.dumps(Runs(tmp_path / "ran")).hex().encode()):
        with pytest.raises(WeightSyncError, match="message 'memory' holds no handle"):
            map_memory(text, size_bytes=SIZE, device=GPU)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"size": SIZE + 1},
        {"size": str(SIZE)},
        {"size": True},
        {"size": 1e3},
        {"offset": -1},
        {"offset": 2**60},
        {"counter_offset": 10_000},
        {"counter_offset": None},
        {"counter": b"/torch_1_2_3/../../etc/passwd".hex()},
        {"counter": b"/psm_1234".hex()},
        {"counter": "zz"},
        {"handle": "00" * 5000},
        {"handle": 7},
        {"event": None},
        {"waits_for_event": 1},
        {"more": 1},
    ],
    ids=str,
)
def test_a_handle_with_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WeightSyncError, match="message 'memory' holds no handle"):
        map_memory(json.dumps(GOOD | change).encode(), size_bytes=SIZE, device=GPU)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"\xff", b"{}", b"[" * 100_000, b'{"handle": 1e999}', b"\x1b[2J"], ids=repr
)
def test_text_that_is_no_handle_is_refused(text: bytes) -> None:
    with pytest.raises(WeightSyncError, match="holds no handle") as caught:
        map_memory(text, size_bytes=SIZE, device=GPU)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_a_good_handle_reaches_cuda() -> None:
    with pytest.raises(AssertionError, match="CUDA was asked"):
        map_memory(json.dumps(GOOD).encode(), size_bytes=SIZE, device=GPU)
