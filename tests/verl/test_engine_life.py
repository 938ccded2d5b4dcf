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


Resumed = tuple[str, dict[str, str], list[tuple[float, float]]]
"""The engine's class, a rank's state, and loss and gradient norm of the two updates that follow."""


def _save(rank: int, model: Path, root: Path, settings: dict[str, Any]) -> Resumed:
    worker = training_worker(model, **settings)
    train(worker, 1)
    worker.save_checkpoint(str(root / "global_step_1" / "actor"), global_step=1)
    saved = state_of(worker)
    return type(worker.engine).__name__, saved, [train(worker, seed) for seed in (2, 3)]


def _resume(rank: int, model: Path, root: Path, settings: dict[str, Any]) -> Resumed:
    worker = training_worker(model, **settings)
    worker.load_checkpoint(str(root / "global_step_1" / "actor"))
    loaded = state_of(worker)
    return type(worker.engine).__name__, loaded, [train(worker, seed) for seed in (2, 3)]


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        ("ours", "ours"),
        ("ours", "stock"),
        ("stock", "ours"),
        pytest.param("stock", "stock", marks=pytest.mark.every_case),
    ],
)
@pytest.mark.parametrize(
    "settings", [{"shards": True}, {"dist_ckpt_optim_fully_reshardable": True}], ids=["shards", "hf_weights"]
)
def test_a_run_resumes_bit_equal_whoever_has_saved(saver, loader, settings, tiny_moe, tmp_path) -> None:
    saved = values(run_verl_ranks(_save, SIZE, tiny_moe, tmp_path, settings, stock=saver == "stock"))
    resumed = values(run_verl_ranks(_resume, SIZE, tiny_moe, tmp_path, settings, stock=loader == "stock"))
    assert {engine for engine, *_ in saved} == {ENGINES[saver]}
    assert {engine for engine, *_ in resumed} == {ENGINES[loader]}
    assert [differences(a[1], b[1]) for a, b in zip(saved, resumed, strict=True)] == [{}] * SIZE
    went_on = [figures for *_, figures in saved]
    assert [figures for *_, figures in resumed] == went_on
    assert all(loss > 0 and norm > 0 for figures in went_on for loss, norm in figures)
    manifest = json.loads((tmp_path / "global_step_1" / "actor" / "ckpt_contents.json").read_text())
    assert manifest["schema_version"] == 2
