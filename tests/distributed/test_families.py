"""Every model family computes in Megatron what it computes in transformers, and trains as it does."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.families import KINDS, LIBRARIES, make, maps
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config, served_store

SIZE, ROWS = 4, 8
pytestmark = pytest.mark.timeout(660)
"""Seconds of the first test, before which all families are run; on two idle cores that takes 150."""
EXPERT_BIAS = "e_score_correction_bias"
LAYOUTS: dict[str, dict[str, int]] = {"dp4": {}, "ep2": {"ep": 2}, "tp2_ep2": {"tp": 2, "ep": 2}, "pp2": {"pp": 2}}


def layouts_of(kind: str) -> dict[str, dict[str, int]]:
    if kind.startswith("olmoe"):
        return {name: sizes for name, sizes in LAYOUTS.items() if "tp" not in sizes}
    if KINDS[kind].experts:
        return LAYOUTS
    return {"dp4": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


CASES = [
    (library, kind, layout)
    for library in LIBRARIES
    for kind in KINDS
    if maps(library, kind)
    for layout in layouts_of(kind)
]
USED = {kind for _, kind, _ in CASES}
Case = tuple[str, str]
"""The library and the layout."""


def _rank(rank: int, kind: str, addresses: dict[Case, StoreAddress], model: Path, old: np.ndarray) -> dict[str, Any]:
    """Goes through the libraries and layouts of a family, each in a world of its own."""
    seen, batch = {}, reference.random_batch(rows=ROWS)
    for (library, layout), address in addresses.items():
        config = run_config(model, **layouts_of(kind)[layout])
        config.model.bridge = library
        made = Worker(config, rank=rank, size=SIZE)
        made.start(address)
        made.build()
        mine = made.shard(batch.with_logprobs(old=old))
        logprobs = made.compute_logprobs(mine)
        (metrics,) = made.update_policy(mine, mini_batch_size=len(mine))
        updated = {name: tensor.numpy().copy() for name, tensor in made.export_hf_weights()}
        seen[f"{library}-{kind}-{layout}"] = {
            "logprobs": None if logprobs is None else (parallel_state.get_data_parallel_rank(), logprobs),
            "updated": updated if rank == 0 else None,
            "own": _own(made),
            "grad_norm": metrics["grad_norm"],
        }
        made.teardown()
    return seen


def _own(made: Worker) -> list[tuple[str, np.ndarray]] | None:
    """Builds the weights that this rank sends; None if every rank must have all weights."""
    own = made.own_hf_weights()
    if own is None:
        return None
    built = [(each, each.make()) for each in own]  # on all ranks that gather
    return [
        (name, tensor.detach().numpy().copy())
        for each, tensors in built
        if each.is_source
        for name, tensor in zip(each.names, tensors, strict=True)
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for kind in USED:
        make(root / kind, kind)
    return root


def _expected(model: Path) -> np.ndarray:
    batch = reference.random_batch(rows=ROWS)
    return reference.logprobs(reference.load(model), batch).detach().numpy() * batch.response_mask


@pytest.fixture(scope="module")
def seen(models: Path) -> list[dict[str, Any]]:
    """By rank: what each case computed.

    Each family has processes of its own. Megatron's DistributedDataParallel never goes, nor do its groups: after forty
    cases a process would have two thousand threads of gloo's, and take ten times as long for a case.
    """
    found: list[dict[str, Any]] = [{} for _ in range(SIZE)]
    for kind in sorted(USED):
        with ExitStack() as stores:
            cases = [(library, layout) for library, each, layout in CASES if each == kind]
            addresses = {case: stores.enter_context(served_store()) for case in cases}
            model = models / kind
            for rank, got in enumerate(values(run_ranks(_rank, SIZE, kind, addresses, model, _expected(model)))):
                found[rank].update(got)
    return found


@pytest.mark.parametrize(("library", "kind", "layout"), CASES)
def test_logprobs_equal_those_of_transformers(
    library: str, kind: str, layout: str, models: Path, seen: list[dict[str, Any]]
) -> None:
    found = [rank[f"{library}-{kind}-{layout}"]["logprobs"] for rank in seen]
    by_rank = dict(pair for pair in found if pair)
    got = np.concatenate([by_rank[rank] for rank in sorted(by_rank)])
    expected = _expected(models / kind)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 5e-6


@pytest.fixture(scope="module")
def steps(models: Path) -> dict[str, tuple[dict[str, torch.Tensor], float]]:
    """The weights after a step of one transformers process, and the norm of its gradient, by kind."""
    made = {}
    for kind in USED:
        hf, batch = reference.load(models / kind), reference.random_batch(rows=ROWS)
        norm = reference.grpo_step(hf, batch, run_config(models / kind).actor)
        made[kind] = reference.hf_weights(hf), norm
    return made


@pytest.mark.parametrize(("library", "kind", "layout"), CASES)
def test_a_step_equals_the_step_of_one_process(
    library: str,
    kind: str,
    layout: str,
    models: Path,
    seen: list[dict[str, Any]],
    steps: dict[str, tuple[dict[str, torch.Tensor], float]],
) -> None:
    case = f"{library}-{kind}-{layout}"
    (expected, norm), got = steps[kind], seen[0][case]["updated"]
    before = load_file(models / kind / "model.safetensors")
    assert got.keys() == expected.keys()
    moved = {name for name in expected if np.abs(got[name] - before[name].numpy()).max() > 0}
    assert {name for name in expected if name not in moved} == {n for n in expected if n.endswith(EXPERT_BIAS)}
    assert max(np.abs(got[name] - expected[name].numpy()).max() for name in expected) <= 1e-6
    assert all(abs(rank[case]["grad_norm"] - norm) <= 1e-4 * norm for rank in seen)


@pytest.mark.parametrize(("library", "kind", "layout"), CASES)
def test_the_ranks_build_each_weight_once_as_an_export_has_it(
    library: str, kind: str, layout: str, seen: list[dict[str, Any]]
) -> None:
    case = f"{library}-{kind}-{layout}"
    own, exported = [rank[case]["own"] for rank in seen], seen[0][case]["updated"]
    if (library, kind) == ("megatron_bridge", "gpt_oss"):  # one weight has all experts of a layer
        assert own == [None] * SIZE
        return
    built = [pair for of_rank in own for pair in of_rank]
    assert sorted(name for name, _ in built) == sorted(exported)
    assert [name for name, value in built if not np.array_equal(value, exported[name])] == []
