"""Workers whose pipeline stages are cut into virtual ones save and load their own checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_safe_workers.checkpoint.folders.manifest import read_manifest
from rl_safe_workers.config import RunConfig, SeededModelConfig
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.models.seeded import create_seeded_model
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config, served_store

SIZE, STAGES = 4, 2
IDENTITY = {"fingerprint": "tiny", "layout": {"world_size": SIZE, "pipeline": 2}}


def _worker(rank: int, address: StoreAddress, config: RunConfig) -> Worker:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    worker.convert()
    return worker


def _step(worker: Worker, seed: int) -> None:
    """An optimizer step on gradients that are the same on all ranks that share a parameter, and differ by chunk."""
    with worker.phase(Phase.TRAIN):
        for index, chunk in enumerate(worker.chunks):
            for parameter in chunk.parameters():
                generator = torch.Generator().manual_seed(1000 * seed + 100 * index + parameter.dim())
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        worker.optimizer.step()


def _layers(worker: Worker) -> list[list[int]]:
    """Numbers of the layers, counted from 1 over the whole model, of each chunk."""
    return [[layer.layer_number for layer in chunk.module.decoder.layers] for chunk in worker.chunks]


def _save(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> dict[str, Any]:
    """Saves after the second step and, in the background, after the third; goes on with a fourth."""
    worker, digests = _worker(rank, address, config), {}
    _step(worker, seed=1)
    for step, background in ((2, False), (3, True)):
        _step(worker, seed=step)
        torch.manual_seed(10 * step + rank)
        digests[step] = worker.digest()
        worker.save_checkpoint(root, step=step, driver_state={}, background=background, **IDENTITY)
    _step(worker, seed=4)
    worker.finalize_checkpoint()
    return {"digests": {**digests, 4: worker.digest()}, "layers": _layers(worker)}


def _load(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> dict[int, str]:
    """Loads what `_save` saved, one after the other; goes on with the fourth step."""
    worker = _worker(rank, address, config)
    digests = {0: worker.digest()}
    for step in (2, 3):
        worker.load_checkpoint(root / f"global_step_{step}", **IDENTITY)
        digests[step] = worker.digest()
    _step(worker, seed=4)
    return {**digests, 4: worker.digest()}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    model = tmp_path_factory.mktemp("virtual_stages") / "model"
    create_seeded_model(model, SeededModelConfig(num_hidden_layers=4, hidden_size=48, head_dim=12))
    config = run_config(model, pp=2, ep=2, vpp=STAGES)
    config.rl_safe.checkpoint.digest = True
    return config


def test_a_worker_with_virtual_stages_loads_every_bit_that_another_saved(config: RunConfig, tmp_path: Path) -> None:
    with served_store() as address:
        saved = values(run_ranks(_save, SIZE, address, config, tmp_path))
    with served_store() as address:
        loaded = values(run_ranks(_load, SIZE, address, config, tmp_path))
    # Else there were no virtual stages: a rank's chunks are not neighbours.
    assert [rank["layers"] for rank in saved] == [[[1], [3]], [[1], [3]], [[2], [4]], [[2], [4]]]
    for mine, theirs in zip(loaded, saved, strict=True):
        fresh = mine.pop(0)
        assert mine == theirs["digests"]
        assert len({fresh, *mine.values()}) == 4
    for step in (2, 3):
        digests = read_manifest(tmp_path / f"global_step_{step}").digests
        assert digests == {str(rank): found["digests"][step] for rank, found in enumerate(saved)}
