"""verl's weight syncs, packed: they bring each weight of verl's own export to every rank, in a few buckets."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_safe_workers.adapters.verl import environment
from rl_safe_workers.adapters.verl.packed_sync import PackedSync
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.rollout.digest import digests_of
from rl_safe_workers.rollout.packed_updates import PackedUpdates
from rl_safe_workers.workers import packed_export
from tests.verl.host import batch, syncing_worker, training_worker
from tests.verl.ranks import run_verl_ranks, values

SIZE, STEPS = 4, 3
WRONG_STEP = 2
"""The step of which a rank packs a wrong byte."""
LAYOUTS = {
    "ep2": {"expert_model_parallel_size": 2},
    "tp2_ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "pp2_ep2": {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
}
Prints = dict[str, tuple[str, tuple[int, ...], str]]


class _Rollout:
    """Stands for verl's adapter of a rollout engine. It keeps what a sync sends."""

    replica_rank = 0

    def __init__(self) -> None:
        self.is_packed: list[bool] = []
        self.tensors = 0
        self.weights: Prints = {}
        self._updates = PackedUpdates(parts=1)

    async def resume(self, tags: list[str]) -> None: ...

    async def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], **_: Any) -> None:
        self.weights, self.tensors = {}, 0
        for weight in weights:
            self.tensors += 1
            if self.tensors == 1:
                self.is_packed.append(PackedUpdates.is_packed([weight]))
            if self.is_packed[-1]:
                self._updates.load([weight], [], self._keep)
            else:
                self._keep(iter([weight]))
        self._updates.end(())

    def _keep(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights |= {name: _print(tensor) for name, tensor in weights}


def _print(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(data).hexdigest()


def _spoil_packing(patch: pytest.MonkeyPatch) -> None:
    """Makes each rank flip a bit of the first weight that it packs."""
    broadcast = packed_export.dist.broadcast

    def spoiled(buffer: torch.Tensor, *, group_src: int, group: Any) -> None:
        if group_src == torch.distributed.get_rank():
            buffer[0] ^= 1
        broadcast(buffer, group_src=group_src, group=group)

    patch.setattr(packed_export.dist, "broadcast", spoiled)


def _syncs(
    rank: int, model: Path, layout: dict[str, Any]
) -> list[tuple[bool, int, bool, dict[str, float], dict[str, int], dict[str, int]]]:
    """Returns for each step.

    Packed or not, tensors sent, as the export or not, the metrics, this rank's digests, and the export's.
    """
    os.environ["RL_SAFE_VERL"] = json.dumps({"packed_sync": True})
    os.environ["RL_SAFE_RUN_ID"] = "packed"
    trained = training_worker(model, **layout)
    rollout, engine = _Rollout(), trained.engine
    worker, process = syncing_worker(trained, rollout), engine.process
    found = []
    for step in range(STEPS):
        trained.train_batch(batch(step))
        process.prove_sync()
        with pytest.MonkeyPatch.context() as patch:
            if step == WRONG_STEP:
                _spoil_packing(patch)
            asyncio.run(worker.update_weights(global_steps=step))
        exported = _exported(engine)
        sent = dict(process.sent_weights().digests)
        expected = {name: int(digests_of([tensor])) for name, tensor in exported.items()}
        same = rollout.weights == {name: _print(tensor) for name, tensor in exported.items()}
        found.append((rollout.is_packed[-1], rollout.tensors, same, process.metrics(), sent, expected))
    return found


def _exported(engine: Any) -> dict[str, torch.Tensor]:
    """Returns the weights of verl's own export. Collective over: the ranks."""
    return {name: tensor.detach().clone() for name, tensor in engine.bridge.export_weights(engine.module)}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.every_case) if name == "ep2" else name for name in LAYOUTS]
)
def test_the_first_sync_is_verls_and_later_ones_are_packed_with_the_same_weights(layout: str, tiny_moe: Path) -> None:
    ranks = values(run_verl_ranks(_syncs, SIZE, tiny_moe, LAYOUTS[layout]))
    for of_rank in ranks:
        assert [is_packed for is_packed, *_ in of_rank] == [False, True, True]
        assert [metrics["rl_safe/sync_packed"] for _, _, _, metrics, _, _ in of_rank] == [0, 1, 1]
        assert [same for _, _, same, *_ in of_rank] == [step != WRONG_STEP for step in range(STEPS)]
        first, *later = [tensors for _, tensors, *_ in of_rank]
        assert first > 50
        assert max(later) <= 1 + SIZE, "the plan, and a bucket of each source"
    for step, of_step in enumerate(zip(*ranks, strict=True)):
        sent = [digests_of_rank for *_, digests_of_rank, _ in of_step]
        expected = of_step[0][-1]
        assert ChainMap(*sent) == expected, "a byte that is wrongly packed does not change the digests"
        assert sum(map(len, sent)) == len(expected)
        takers = sum(map(bool, sent))
        assert takers == 1 if step == 0 else takers > 1, "each rank takes digests of the weights that it packs"


class _Engine:
    """An engine of verl's that cannot be packed."""

    vanilla_bridge = True
    bridge = object()
    module: tuple[()] = ()


def test_an_export_that_cannot_be_packed_goes_on_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.get_rank", lambda: 0)
        packed = PackedSync(_Engine(), host_bytes=2**20)
        for _ in range(2):
            weights = {"norm": torch.ones(2)}
            assert dict(packed.weights(iter(weights.items()), None)) == weights
            assert not packed.is_ready
    assert [record.getMessage() for record in caplog.records] == [
        "rl_safe: weight syncs are not packed: mbridge does not tell which rank has which weight; use Megatron-Bridge "
        "(vanilla_mbridge=false)"
    ]


def test_packed_syncs_need_our_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_SAFE_VERL", json.dumps({"packed_sync": True}))
    monkeypatch.delenv("RL_SAFE_RUN_ID", raising=False)
    with pytest.raises(ConfigError, match=r"rl_safe.packed_sync=true needs our entry, .*adapters.verl.main_ppo$"):
        environment.check_packed_sync()
    monkeypatch.setenv("RL_SAFE_RUN_ID", "run")
    environment.check_packed_sync()
