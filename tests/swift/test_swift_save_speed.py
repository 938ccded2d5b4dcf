"""The time of a save of 18,720 sharded tensors on each of four ranks, ours and stock ms-swift's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.swift.jobs import HERE, Forge

INVENTORY = HERE / "inventory" / "inventory_plugin.py"
LIMIT_S = 1500.0


@pytest.mark.every_case
@pytest.mark.timeout(3600)
def test_a_save_takes_a_twentieth_of_stocks_time(forge: Forge, inputs: Path, tmp_path: Path) -> None:
    found = {}
    for name, ours in (("ours", True), ("stock", False)):
        job = forge.train(
            tmp_path / name,
            inputs,
            "--expert_model_parallel_size",
            "2",
            ranks=4,
            ours=ours,
            plugins=[INVENTORY],
            limit_s=LIMIT_S,
        )
        saves = [job.check().record(rank)["saves"] for rank in range(4)]
        # The slowest rank of each save: the first one plans, a later one has the plan.
        found[name] = [max(rank[number]["seconds"] for rank in saves) for number in range(2)]
    ratios = [ours / stock for ours, stock in zip(found["ours"], found["stock"], strict=True)]
    sys.stdout.write(f"\nseconds of two saves, ours and stock's: {found}; ratios {ratios}\n")
    assert max(ratios) <= 0.05
