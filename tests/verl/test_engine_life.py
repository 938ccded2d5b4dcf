"""verl's worker drives our engine: initialise, train, save, load, tear down, on gloo with the tiny MoE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.verl.host import differences, state_of, train, training_worker
from tests.verl.ranks import run_verl_ranks, values

SIZE = 4
ENGINES = {"ours": "SafeMegatronEngine", "stock": "MegatronEngineWithLMHead"}


def _save(rank: int, model: Path, root: Path, settings: dict[str, Any]) -> tuple[str, dict[str, str], float]:
    worker = training_worker(model, **settings)
    train(worker, 1)
    worker.save_checkpoint(str(root / "global_step_1" / "actor"), global_step=1)
    saved = state_of(worker)
    return type(worker.engine).__name__, saved, train(worker, 2)


def _load(rank: int, model: Path, root: Path, settings: dict[str, Any]) -> tuple[str, dict[str, str], float]:
    worker = training_worker(model, **settings)
    # Other weights than those saved; and on a CPU verl's own load needs an optimizer that has taken a step.
    train(worker, 3)
    worker.load_checkpoint(str(root / "global_step_1" / "actor"))
    loaded = state_of(worker)
    return type(worker.engine).__name__, loaded, train(worker, 2)


@pytest.mark.parametrize("saver", ["ours", "stock"])
@pytest.mark.parametrize("loader", ["ours", "stock"])
@pytest.mark.parametrize("settings", [{"shards": True}, {}], ids=["shards", "hf_weights"])
def test_a_checkpoint_comes_back_bit_equal(saver, loader, settings, tiny_moe, tmp_path) -> None:
    saved = values(run_verl_ranks(_save, SIZE, tiny_moe, tmp_path, settings, stock=saver == "stock"))
    loaded = values(run_verl_ranks(_load, SIZE, tiny_moe, tmp_path, settings, stock=loader == "stock"))
    assert {engine for engine, *_ in saved} == {ENGINES[saver]}
    assert {engine for engine, *_ in loaded} == {ENGINES[loader]}
    assert [differences(a[1], b[1]) for a, b in zip(saved, loaded, strict=True)] == [{}] * SIZE
    assert [loss for *_, loss in loaded] == [loss for *_, loss in saved]
    manifest = json.loads((tmp_path / "global_step_1" / "actor" / "ckpt_contents.json").read_text())
    assert manifest["schema_version"] == 2
