"""Extra states of layers, the scales of 8-bit ones: saved, loaded under the same and another layout, and by Megatron.

A layer of Megatron's stands for one of Transformer Engine's, which need a GPU: it keeps its scales as they do, as
pickled bytes.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from rl_safe_workers.checkpoint.folders.manifest import SHARDS
from rl_safe_workers.checkpoint.state.layer_states import extra_states
from rl_safe_workers.checkpoint.state.model_state import model_state
from rl_safe_workers.config import RunConfig
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config, served_store

SIZE = 2
SCALES = torch.tensor([448.0, 0.5, 1.25])
LAYER = "decoder.layers.1.self_attention.linear_proj._extra_state"


class ScaledLinear(RowParallelLinear):
    """A layer with scales, kept as transformer_engine/pytorch/module/base.py does."""

    scales: torch.Tensor | None

    def get_extra_state(self) -> torch.Tensor:
        if self.scales is None:
            return torch.empty(0, dtype=torch.uint8)
        state = {"scale_fwd": self.scales, "extra_fp8_variables": {"num_gemms": 1}}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        if state is not None and state.numel():
            self.scales = pickle.loads(state.numpy().tobytes())["scale_fwd"]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 1}, sharded_offsets)


def _worker(rank: int, address: StoreAddress, config: RunConfig, *, scales: torch.Tensor | None) -> Worker:
    """A worker with such scales in each attention."""
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    worker.convert()
    worker.step(reference.random_batch(rows=4, seed=rank))
    worker.bridge.config.fp8 = "hybrid"  # scales change with every step
    for name, layer in worker.chunks[0].named_modules():
        if name.endswith("self_attention.linear_proj"):
            layer.__class__, layer.scales = ScaledLinear, scales
    return worker


def _identity(config: RunConfig) -> dict[str, Any]:
    return {"fingerprint": "tiny", "layout": {"world_size": SIZE, "tensor": config.megatron.tensor_model_parallel_size}}


def _save(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> str:
    worker = _worker(rank, address, config, scales=None)
    worker.save_checkpoint(root, step=1, driver_state={}, **_identity(config))
    for layer in (m for m in worker.chunks[0].modules() if isinstance(m, ScaledLinear)):
        layer.scales = SCALES
    worker.save_checkpoint(root, step=2, driver_state={}, **_identity(config))
    return worker.digest()


def _load(rank: int, address: StoreAddress, config: RunConfig, path: Path, scales: torch.Tensor | None) -> Any:
    worker = _worker(rank, address, config, scales=scales)
    before = worker.digest()
    worker.load_checkpoint(path, **_identity(config))
    ours = extra_states(worker.chunks[0].module)
    digest = worker.digest()
    (chunk,) = worker.chunks
    chunk.module.load_state_dict(dist_checkpointing.load(model_state([chunk]), str(path / SHARDS))["model"])
    return {"ours": ours, "stock": extra_states(chunk.module), "digest": digest, "before": before}


@pytest.fixture(scope="module")
def saved(seeded_models: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    root = tmp_path_factory.mktemp("checkpoints")
    with served_store() as address:
        return root, values(run_ranks(_save, SIZE, address, run_config(seeded_models["moe"], ep=2), root))


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2, "ep": 2}], ids=["ep2", "tp2_ep2"])
@pytest.mark.parametrize("scales", [None, 2 * SCALES], ids=["none yet", "others"])
def test_scales_come_back_as_megatron_reads_them(
    sizes: dict[str, int], scales: torch.Tensor | None, saved: Any, seeded_models: Any
) -> None:
    root, digests = saved
    with served_store() as address:
        config = run_config(seeded_models["moe"], **sizes)
        found = values(run_ranks(_load, SIZE, address, config, root / "global_step_2", scales))
    for rank in found:
        assert torch.equal(rank["ours"][LAYER]["scale_fwd"], SCALES)
        assert rank["ours"].keys() == rank["stock"].keys()
        assert all(torch.equal(rank["stock"][key]["scale_fwd"], SCALES) for key in rank["stock"])
    if "tp" not in sizes:
        assert [rank["digest"] for rank in found] == digests
        assert all(rank["before"] != rank["digest"] for rank in found)


def test_a_checkpoint_from_before_the_scales_leaves_them(saved: Any, seeded_models: Any) -> None:
    root, _ = saved
    with served_store() as address:
        config = run_config(seeded_models["moe"], ep=2)
        found = values(run_ranks(_load, SIZE, address, config, root / "global_step_1", SCALES))
    assert all(torch.equal(rank["ours"][LAYER]["scale_fwd"], SCALES) for rank in found)
