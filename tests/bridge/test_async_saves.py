"""Asynchronous saves by NeMo RL's own calls of Megatron-Bridge: ours are of their moment; stock's repeat the first."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from tests.distributed.ranks import run_ranks, values
from tests.nemo_rl.source import needs_source, releases_cache

NVRX = os.environ.get("NVRX_SRC", "")
pytestmark = needs_source


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("async") / "model"
    create_seeded_model(path, SeededModelConfig(num_experts=0))
    return path


def _call(rank: int, *args: Any) -> dict[str, Any]:
    """Imports the libraries in the rank alone: here their warnings would be errors."""
    if NVRX:
        sys.path.insert(0, NVRX)
        import nvidia_resiliency_ext

        nvidia_resiliency_ext.__version__ = "0.6.0"  # a checkout is not installed, and tells none
    from tests.bridge import async_saves

    return async_saves.saves(rank, *args)


def test_each_async_save_holds_the_state_at_its_start(model: Path, tmp_path: Path) -> None:
    (found,) = values(run_ranks(_call, 1, model, tmp_path, "ours", timeout_s=280))
    assert found["tensors"] > 10
    assert found["of their moment"] == [found["tensors"]] * 4
    assert found["stale"] == [0] * 3


@pytest.mark.skipif(not NVRX, reason="NVRX_SRC names no folder src of a checkout of nvidia-resiliency-ext 0.6.0")
def test_each_of_stocks_after_the_first_repeats_it_unless_the_cache_is_dropped(model: Path, tmp_path: Path) -> None:
    (found,) = values(run_ranks(_call, 1, model, tmp_path, "stock", timeout_s=100))
    every = found["tensors"]
    good, repeated = ([every] * 4, [0] * 3), ([every, 0, 0, 0], [every] * 3)
    assert (found["of their moment"], found["stale"]) == (good if releases_cache() else repeated)
