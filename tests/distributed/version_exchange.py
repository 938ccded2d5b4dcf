"""Saves or loads with whichever megatron-core is imported: ... version_exchange save|load MODEL ROOT"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

from rl_safe_workers.checkpoint.audit import audit
from rl_safe_workers.checkpoint.state.optimizer_state import parts_of
from rl_safe_workers.config import RunConfig
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.distributed.shards import SIZE, Saving, differences, emptied, state_of
from tests.distributed.worker import Worker, run_config, served_store

IDENTITY = {"fingerprint": "tiny", "layout": {"world_size": SIZE}}


def _digest(worker: Worker) -> str:
    """Digests every tensor of model and optimizer; settings of the optimizer differ from version to version."""
    tensors = [p for chunk in worker.chunks for _, p in sorted(chunk.named_parameters())]
    for part in parts_of(worker.optimizer):
        for group in part.optimizer.param_groups:
            tensors += group["params"]
            tensors += [
                part.optimizer.state[p][key] for p in group["params"] for key in ("exp_avg", "exp_avg_sq", "step")
            ]
    data = [tensor.detach().reshape(-1).view(torch.uint8).tolist() for tensor in tensors]
    return hashlib.sha256(b"".join(map(bytes, data))).hexdigest()


def _worker(rank: int, address: StoreAddress, config: RunConfig) -> Worker:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    worker.convert()
    return worker


def _save(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> str:
    worker = _worker(rank, address, config)
    worker.step(reference.random_batch(rows=8))
    worker.save_checkpoint(root / "model", step=1, driver_state={}, **IDENTITY)
    Saving(rank, address).save(state_of(rank, step=1), root / "shards", step=1)
    return _digest(worker)


def _load(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> str:
    worker = _worker(rank, address, config)
    worker.load_checkpoint(root / "model" / "global_step_1", **IDENTITY)
    loaded = Saving(rank, address).load(emptied(state_of(rank, step=1)), root / "shards" / "global_step_1")
    assert differences(loaded, state_of(rank, step=1)) == []
    return _digest(worker)


def main(action: str, model: Path, root: Path) -> None:
    """Saves and writes down digests, or loads and compares with them."""
    digests = root / "digests.json"
    with served_store() as address:
        found = values(run_ranks({"save": _save, "load": _load}[action], SIZE, address, run_config(model, ep=2), root))
    if action == "save":
        digests.write_text(json.dumps(found))
    assert found == json.loads(digests.read_text())
    for name in ("model", "shards"):
        report = audit(root / name / "global_step_1", deep=True)
        assert report.ok, report.problems


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
