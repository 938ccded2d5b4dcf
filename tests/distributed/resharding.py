"""The ranks of the resharding tests: they save under one layout and load under others."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from rl_safe_workers.checkpoint.state.pieces import split
from rl_safe_workers.checkpoint.state.rng import rng_state, set_rng_state
from tests.distributed.laid_out_rank import DP_RESHARDABLE, HOMOGENEOUS, Layout, Rank, join, layout
from tests.distributed.recording import recorded_collectives

SAVED = Layout(ep=2)
OTHERS = {
    "tp2_ep2": Layout(tp=2, ep=2),
    "tp2_ep2_etp2": Layout(tp=2, ep=2, etp=2),
    "pp2_ep2": Layout(pp=2, ep=2),
    "pp2_vpp2": Layout(pp=2, vpp=2),
    "ep4": Layout(ep=4),
    "ep1": Layout(),
    "tp2_ep1": Layout(tp=2),
}


def _follows_a_moved_tensor(trainer: Rank) -> bool:
    """Returns True if a later description sees what took a tensor's place."""
    part = trainer.optimizer.chained_optimizers[0]
    main = part.optimizer.param_groups[0]["params"][0]
    before = part.optimizer.state[main]["exp_avg"]
    part.optimizer.state[main]["exp_avg"] = moved = before.clone()
    storages = {s.data.untyped_storage().data_ptr() for s in split(trainer.ours(is_loading=False)["optimizer"]).tensors}
    part.optimizer.state[main]["exp_avg"] = before
    return moved.untyped_storage().data_ptr() in storages


def _draw() -> tuple[float, float, float]:
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return random.random(), float(np.random.rand()), float(torch.rand(()))


def _draws_after_a_restore() -> list[tuple[float, float, float]]:
    """The first draws, and those after the state before them was restored from a file that may hold no code."""
    file = io.BytesIO()
    torch.save(rng_state(), file)
    file.seek(0)
    drawn = _draw()
    set_rng_state(torch.load(file, weights_only=True))
    return [drawn, _draw()]


def save_and_reshard(rank: int, model: Path, root: Path) -> dict[str, Any]:
    join(rank, 4, root)
    found: dict[str, Any] = {}
    with layout(model, SAVED) as trainer:
        trainer.step(0)
        trainer.step(1)
        found["saved"] = trainer.held()
        with recorded_collectives() as collectives:
            state = trainer.ours(is_loading=False)
        found["collectives"] = list(collectives)
        rows = [
            (s.local_shape[-1], s.global_shape[-1])
            for s in split(state["optimizer"]).tensors
            if len(s.global_shape) > 1
        ]
        found["cut rows"] = sum(length < whole for length, whole in rows)
        found["follows"] = _follows_a_moved_tensor(trainer)
        found["draws"] = _draws_after_a_restore()
        trainer.save(root / "ours", state)
        trainer.save_with_stock(root / "stock", trainer.stock(is_loading=False))
        trainer.save(root / "homogeneous", trainer.ours(is_loading=False, metadata=HOMOGENEOUS), HOMOGENEOUS)
        trainer.save(root / "dp_reshardable", trainer.ours(is_loading=False, metadata=DP_RESHARDABLE), DP_RESHARDABLE)
        found["after"] = [trainer.step(2), trainer.step(3)]
    for name, sizes in OTHERS.items():
        with layout(model, sizes) as trainer:
            trainer.load(root / "ours", rng=False)
            found[name], found[f"{name} described"] = trainer.held(), trainer.described()
    with layout(model, OTHERS["pp2_ep2"]) as trainer:
        found["ours by stock"] = trainer.load_with_stock(root / "ours")
        trainer.load(root / "stock", rng=False)
        found["stock by ours"] = trainer.held()
        trainer.load(root / "homogeneous", rng=False, metadata=HOMOGENEOUS)
        found["homogeneous"] = trainer.held()
    with layout(model, SAVED) as trainer:
        trainer.load(root / "dp_reshardable", rng=False, metadata=DP_RESHARDABLE)
        found["dp_reshardable"] = trainer.held()
    return found


def continue_on_two(rank: int, model: Path, root: Path) -> dict[str, Any]:
    join(rank, 2, root)
    with layout(model, SAVED) as trainer:
        trainer.load(root / "ours", rng=False)
        return {"held": trainer.held(), "after": [trainer.step(2), trainer.step(3)]}


def make_round_trips(rank: int, model: Path, root: Path) -> dict[str, Any]:
    join(rank, 4, root)
    found: dict[str, Any] = {}
    for name, dtype, saved, others in (
        ("vpp", "float32", Layout(pp=2, vpp=2), {"vpp": Layout(pp=2, vpp=2), "pp1": Layout(ep=2)}),
        ("bf16", "bfloat16", Layout(tp=2, ep=2), {"tp2": Layout(tp=2, ep=2), "ep4": Layout(ep=4)}),
    ):
        with layout(model, saved, dtype) as trainer:
            trainer.step_on_anything()
            trainer.step_on_anything()
            found[name] = {"saved": trainer.held()}
            trainer.save(root / name, trainer.ours(is_loading=False))
        for other, sizes in others.items():
            with layout(model, sizes, dtype) as trainer:
                trainer.load(root / name, rng=sizes == saved)
                found[name][other] = trainer.held()
    return found
