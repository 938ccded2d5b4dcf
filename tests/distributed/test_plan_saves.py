"""The bytes of each rank that a plan predicts are those that megatron-core's own save writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron.core import parallel_state

from rl_safe_workers.checkpoint.save.megatron_native import save_with_megatron
from rl_safe_workers.config import CheckpointConfig, RunConfig, SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.plan.model import ModelSize, split_layers
from rl_safe_workers.plan.saves import GIB, plan_saves
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config

SIZE = 4
WIDE = SeededModelConfig(hidden_size=256, intermediate_size=512, moe_intermediate_size=512, num_hidden_layers=4)
"""Wide enough that the kilobyte around each tensor of a file is little."""
WAYS = [(sharding, fully) for sharding in ("dp_reshardable", "fully_reshardable") for fully in (False, True)]


def _written(rank: int, address: StoreAddress, config: RunConfig, root: str) -> list[int]:
    """Bytes of this rank's files, for each of `WAYS`."""
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    worker.convert()
    worker.step(reference.random_batch(rows=8))
    found = []
    for number, (sharding, fully_parallel) in enumerate(WAYS):
        metadata = {
            "distrib_optim_sharding_type": sharding,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = {f"model{i}": c.module.sharded_state_dict(metadata=metadata) for i, c in enumerate(worker.chunks)}
        state = {**model, "optimizer": worker.optimizer.sharded_state_dict(model, is_loading=False, metadata=metadata)}
        flags = CheckpointConfig(fully_parallel_save=fully_parallel, validate_access_integrity=False)
        directory = Path(root) / str(number)
        save_with_megatron(state, directory, flags, {"distrib_optim_sharding_type": sharding})
        found.append(sum(file.stat().st_size for file in directory.glob(f"__{rank}_*.distcp")))
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"ep": 2}, marks=pytest.mark.every_case),
        {"pp": 2, "ep": 2},
        pytest.param({"tp": 2, "ep": 2}, marks=pytest.mark.every_case),
    ],
    ids=["ep2", "pp2", "tp2"],
)
def test_each_rank_writes_what_was_planned(sizes: dict[str, int], address: StoreAddress, tmp_path: Path) -> None:
    create_seeded_model(tmp_path / "model", WIDE)
    for number in range(len(WAYS)):
        (tmp_path / str(number)).mkdir()
    config = run_config(tmp_path / "model", **sizes)
    by_rank = values(run_ranks(_written, SIZE, address, config, str(tmp_path)))
    layout = ParallelLayout.of(config.megatron, world_size=SIZE)
    stages = ModelSize.read(tmp_path / "model").stages(split_layers(4, layout.pipeline, first=None, last=None))
    planned = plan_saves(layout, stages, instances=1, weight_bytes=4, nodes=[0] * SIZE, node_bytes_s=GIB, raises=True)
    by_way = {(way.sharding, way.fully_parallel): way.bytes_by_rank for way in planned}
    for number, way in enumerate(WAYS):
        written = [counts[number] for counts in by_rank]
        assert written == pytest.approx(by_way[way], rel=0.01), (way, written, by_way[way])
