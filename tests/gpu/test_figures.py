"""The main job and the larger model on 2 or 4 GPUs: what must hold is asserted, what is fast is printed.

    python -m pytest tests/gpu/test_figures.py

takes some ten minutes and ends with the table of all figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from benchmarks import gpu
from benchmarks.table import Row

pytestmark = pytest.mark.timeout(560)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Outside pytest's, whose folders outlive the tests: this one gets 100 GiB of checkpoints."""
    with TemporaryDirectory(prefix="rl_safe_gpu_") as path:
        yield Path(path)


def _need(gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs; there are {torch.cuda.device_count()}")


@pytest.mark.parametrize("placement", gpu.PLACEMENTS)
def test_the_main_job_learns_agrees_and_leaves_nothing(placement: str, folder: Path, rows: list[Row]) -> None:
    _need(int(placement[0]))
    found = gpu.main_job(folder, placement, print, ["rollout.prove_sync_freq=1"])
    rows += found
    must_hold = ("reward gain", "median of the worst step", "processes left", "GPU memory left", "syncs redone")
    assert sum(row.name.endswith(must_hold) for row in found) == len(must_hold)
    assert [row.name for row in found if row.name.endswith(must_hold) and not row.met] == []


def test_four_ranks_have_the_parameters_that_two_have_saved(folder: Path, rows: list[Row]) -> None:
    _need(4)
    row = gpu.resume(folder, print)
    rows.append(row)
    assert row.met


def test_a_larger_model_syncs_trains_offloads_and_saves(folder: Path, rows: list[Row]) -> None:
    _need(2)
    rows += gpu.larger_model(folder, torch.cuda.device_count(), print)
