"""``audit A B`` on steps that real trainers have saved: honest ones, and ones with stale parts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_safe_workers.checkpoint.audit_steps import audit_steps
from rl_safe_workers.checkpoint.folders.manifest import step_dir
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config, served_store

SIZE, HONEST = 2, 20
IDENTITY: dict[str, Any] = {"fingerprint": "tiny", "layout": {"world_size": SIZE}, "driver_state": {}}
SPOILED = {"all is a copy": 100, "stale optimizer": 102, "stale weights": 104, "one stale expert": 106}
"""The step under which each is saved. The step before it is honest."""
EXPERT = "mlp.experts"


def _tensors(worker: Worker, what: str) -> dict[str, torch.Tensor]:
    """The tensors of this rank that a fault leaves as they were."""
    weights = {name: value for chunk in worker.chunks for name, value in chunk.named_parameters()}
    if what == "stale weights":
        return weights
    if what == "one stale expert":
        name = next(name for name in sorted(weights) if EXPERT in name)
        return {name: weights[name]} if worker.safe.training_rank == 0 else {}
    # Chained optimizers of Megatron: one for dense parameters, one for experts.
    states = [state for part in worker.optimizer.chained_optimizers for state in part.optimizer.state.values()]
    moments = [value for state in states for value in state.values() if torch.is_tensor(value) and value.dim()]
    return {str(number): value for number, value in enumerate(moments)} if what == "stale optimizer" else {}


def _train(rank: int, address: StoreAddress, model: Path, root: Path) -> None:
    config = run_config(model, ep=2)
    config.rl_safe.checkpoint.keep_last = 0
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    worker.convert()
    batch = reference.random_batch(rows=4, length=24)
    for step in range(1, HONEST + 2):
        worker.step(batch)
        worker.save_checkpoint(root, step=step, **IDENTITY)
    for what, step in SPOILED.items():
        worker.save_checkpoint(root, step=step - 1, **IDENTITY)
        before = {name: value.detach().clone() for name, value in _tensors(worker, what).items()}
        if what != "all is a copy":
            worker.step(batch)
        _set(_tensors(worker, what), before)
        worker.save_checkpoint(root, step=step, **IDENTITY)
    worker.teardown()


def _set(tensors: dict[str, torch.Tensor], to: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in tensors.items():
            value.copy_(to[name])


@pytest.fixture(scope="module")
def root(seeded_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("steps")
    with served_store() as address:
        values(run_ranks(_train, SIZE, address, seeded_models["moe"], root))
    return root


@pytest.mark.every_case
def test_twenty_honest_pairs_raise_no_alarm(root: Path) -> None:
    for first, second in pairwise(range(1, HONEST + 2)):
        report = audit_steps(step_dir(root, first), step_dir(root, second))
        assert report.ok, report.problems
        assert report.steps == (first, second)
        # An expert that got no token may stay as it is.
        assert report.moved > 40


@pytest.mark.parametrize(
    ("what", "kind", "at_least"),
    [
        ("all is a copy", "copy", 1),
        ("stale optimizer", "optimizer", 40),
        ("stale weights", "weights", 40),
        ("one stale expert", "weights", 1),
    ],
)
def test_each_stale_part_is_found(what: str, kind: str, at_least: int, root: Path) -> None:
    report = audit_steps(step_dir(root, SPOILED[what] - 1), step_dir(root, SPOILED[what]))
    assert not report.ok
    assert set(report.counts) == {kind}
    assert report.counts[kind] == at_least if at_least == 1 else report.counts[kind] >= at_least
