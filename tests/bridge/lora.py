"""The ranks of the tests of adapters: they save under one layout, and load under it and under another."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rl_safe_workers.adapters.shards import ShardWriter
from rl_safe_workers.errors import CheckpointMismatchError
from rl_safe_workers.worlds.address import StoreAddress
from tests.bridge.bridge_saves import ITERATION, load_with_bridge, save_with_bridge
from tests.bridge.lora_rank import LoraRank, LoraWorker
from tests.distributed import reference
from tests.distributed.laid_out_rank import Layout, control, join, layout
from tests.distributed.worker import run_config

LAYOUTS = {"ep2": Layout(ep=2), "tp2_ep2": Layout(tp=2, ep=2), "pp2_ep2": Layout(pp=2, ep=2)}
NEXT = {"ep2": "tp2_ep2", "tp2_ep2": "pp2_ep2", "pp2_ep2": "ep2"}


def save_and_load(rank: int, model: Path, root: Path, adapters: str, name: str) -> dict[str, Any]:
    join(rank, 4, root)
    found: dict[str, Any] = {}
    kind = partial(LoraRank, adapters=adapters)
    with layout(model, LAYOUTS[name], kind=kind) as trainer:
        found["base"] = trainer.base_digest()
        trainer.step(0)
        trainer.step(1)
        found["base trained"] = trainer.base_digest()
        found["saved"], found["exported"] = trainer.held(), trainer.exported()
        trainer.save(root / "ours", trainer.ours(is_loading=False))
        trainer.save_with_stock(root / "stock", trainer.stock(is_loading=False))
        found["after"] = [trainer.step(2), trainer.held()]
    with layout(model, LAYOUTS[name], kind=kind) as trainer:
        trainer.scramble()
        trainer.load(root / "ours")
        found["base loaded"] = trainer.base_digest()
        found["loaded"], found["exported again"] = trainer.held(), trainer.exported()
        found["by stock"] = trainer.differing_by_stock(root / "ours")
        found["after the load"] = [trainer.step(2), trainer.held()]
    with layout(model, LAYOUTS[NEXT[name]], kind=kind) as trainer:
        trainer.scramble()
        trainer.load(root / "ours", rng=False)
        found["elsewhere"], found["exported elsewhere"] = trainer.held(), trainer.exported()
        found["described elsewhere"] = trainer.described()
        found["by stock elsewhere"] = trainer.differing_by_stock(root / "ours")
        trainer.scramble()
        trainer.load_weights(root / "ours")
        found["exported from weights alone"] = trainer.exported()
        trainer.scramble()
        trainer.load(root / "stock", rng=False)
        found["stock by ours"] = trainer.held()
    return found


def exchange_with_bridge(rank: int, model: Path, root: Path, adapters: str, name: str) -> dict[str, Any]:
    """Bridge saves adapters alone, with its shards written by us and by Megatron, and loads both."""
    join(rank, 4, root)
    found: dict[str, Any] = {}
    kind = partial(LoraRank, adapters=adapters)
    with layout(model, LAYOUTS[name], kind=kind) as trainer:
        trainer.step(0)
        trainer.step(1)
        writer = ShardWriter(control(), folders=3)
        with writer.saving("training", remaining=lambda: timedelta(seconds=60), optimizer_replicated=False):
            save_with_bridge(trainer, root / "ours")
        save_with_bridge(trainer, root / "stock")
        found["saved"], found["exported"] = trainer.held(), trainer.exported()
        with pytest.raises(CheckpointMismatchError) as refused:
            trainer.load(root / "ours" / ITERATION)
        found["refused"] = str(refused.value)
    for saved in ("ours", "stock"):
        with layout(model, LAYOUTS[name], kind=kind) as trainer:
            found[f"step of {saved}"] = load_with_bridge(trainer, root / saved)
            trainer.load_optimizer(root / saved / ITERATION)
            found[saved], found[f"exported {saved}"] = trainer.held(), trainer.exported()
    return found


def save_with_the_mixin(rank: int, address: StoreAddress, model: Path, root: Path, adapters: str) -> dict[str, Any]:
    """Saves at TP2, goes on, and loads: under the layout of the save, and as if under another one."""
    worker = LoraWorker(run_config(model, tp=2), rank=rank, size=2, adapters=adapters)
    worker.start(address)
    worker.convert()
    worker.step(reference.random_batch(rows=4))
    saved = worker.digest()
    path = worker.save_checkpoint(root, step=1, fingerprint="tiny", layout={"tensor": 2}, driver_state={})
    worker.step(reference.random_batch(rows=4, seed=1))
    moved = worker.digest()
    worker.load_checkpoint(path, fingerprint="tiny", layout={"tensor": 2})
    loaded, refused = worker.digest(), ""
    try:
        worker.load_checkpoint(path, fingerprint="tiny", layout={"tensor": 1})
    except CheckpointMismatchError as error:
        refused = str(error)
    return {"saved": saved, "moved": moved, "loaded": loaded, "refused": refused}
