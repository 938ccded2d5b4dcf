"""Weights out of Megatron-Bridge's tasks on the ranks that hold them, when the conversion of a parameter fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.models import conversion_tasks
from rl_safe_workers.models.own_weights import OwnWeight
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import own_weights
from tests.distributed.own_weights import LAYOUTS, NUM_EXPERTS, SIZE
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import served_store

VICTIM = 1


def _no_memory(*_: object, **__: object) -> OwnWeight:
    raise MemoryError("no room for a copy")


def _list_weights(rank: int, address: StoreAddress, models: Path, layout: str, failing: set[int]) -> str | None:
    """Returns None if the export is needed, or else the error."""
    worker = own_weights._worker(rank, address, models, LAYOUTS[layout])
    if rank in failing:
        conversion_tasks.own_weight = _no_memory
    try:
        own = worker.own_hf_weights()
    except WeightSyncError as error:
        return str(error)
    assert own is None
    return own


@pytest.mark.parametrize(
    ("layout", "failing", "error"),
    [
        ("ep4", {VICTIM}, ""),
        ("tp2_ep2", set(range(SIZE)), r"cannot be converted alone: MemoryError: no room for a copy"),
    ],
)
def test_all_ranks_export_if_one_cannot_convert_and_fail_if_it_is_tensor_parallel(
    layout: str, failing: set[int], error: str, tmp_path: Path
) -> None:
    create_seeded_model(tmp_path / "moe", SeededModelConfig(num_experts=NUM_EXPERTS))
    with served_store() as address:
        found = values(run_ranks(_list_weights, SIZE, address, tmp_path, layout, failing))
    if not error:
        assert found == [None] * SIZE
    else:
        assert all(text.endswith(error) for text in found)
