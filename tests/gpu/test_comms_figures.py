"""Communicators on four GPUs, or on two in smaller layouts: what must hold is asserted, what is fast is printed.

    python -m pytest tests/gpu/test_comms_figures.py

takes some ten minutes and ends with the table of all figures; ``-k`` chooses layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from benchmarks import comms
from benchmarks.gpu import make_model
from benchmarks.table import Row

pytestmark = pytest.mark.timeout(560)
MUST_HOLD = (
    "growth in the first 3 steps",
    "against every group",
    "against nothing",
    "growth over 18 cycles",
    "without releases",
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="rl_safe_gpu_") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    path = folder / "model"
    make_model(path, comms.LARGE)
    return path


@pytest.mark.parametrize(
    "layout", [*comms.LAYOUTS, *comms.SMALL_LAYOUTS], ids=lambda layout: layout.name.replace(" ", "_")
)
def test_the_bootstrap_is_complete_and_small(layout: comms.Layout, model: Path, rows: list[Row]) -> None:
    gpus = torch.cuda.device_count()
    if gpus < 2 or layout not in comms.layouts_for(gpus):
        pytest.skip(f"for {layout.ranks} GPUs; there are {gpus}")
    out = model.parent / layout.name.replace(" ", "_")
    out.mkdir()
    found = comms.run_layouts(
        out, [layout], [f"model.path={model}", *comms.LARGE_BATCH], rows=comms.ROWS, tokens=comms.TOKENS, report=print
    )
    made = comms.rows(layout.name, found[layout.name])
    rows += made
    assert [row.name for row in made if row.name.endswith(MUST_HOLD) and row.unit != "s" and not row.met] == []
