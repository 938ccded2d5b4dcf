"""Slices: each host loads from a copy of what `rl-safe slices` lists for it, and from nothing else."""

from __future__ import annotations

import io
import json
import random
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS, model_fingerprint
from rl_safe_workers.checkpoint.format.index import CheckpointIndex, read_index
from rl_safe_workers.cli import slices_command
from rl_safe_workers.cli.main import main
from rl_safe_workers.config import RunConfig
from rl_safe_workers.driver.inputs.preflight import layout_of
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.ranks import Outcome, run_ranks, values
from tests.distributed.worker import Worker, run_config, served_store

SIZE, PER_NODE = 4, 2
LAYOUTS = {"as it was saved": {"ep": 2}, "TP2 EP2": {"tp": 2, "ep": 2}, "PP2 EP2": {"pp": 2, "ep": 2}}


def _run(function: Any, *args: Any) -> list[Outcome]:
    with served_store() as address:
        return run_ranks(function, SIZE, address, *args)


def _worker(rank: int, address: StoreAddress, config: RunConfig) -> Worker:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    worker.convert()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    return worker


def _identity(config: RunConfig) -> dict[str, Any]:
    return {"fingerprint": model_fingerprint(config.model.path), "layout": asdict(layout_of(config))}


def _save(rank: int, address: StoreAddress, config: RunConfig, root: Path) -> None:
    worker = _worker(rank, address, config)
    worker.step(reference.random_batch(rows=8))
    torch.manual_seed(rank)
    worker.save_checkpoint(root, step=1, driver_state={}, **_identity(config))


def _load(rank: int, address: StoreAddress, config: RunConfig, places: list[Path]) -> str:
    """Loads from the directory of this rank's host; returns a digest of all that came of it."""
    worker = _worker(rank, address, config)
    worker.load_checkpoint(places[rank // PER_NODE], **_identity(config))
    return worker.digest()


@pytest.fixture(scope="module")
def model(seeded_models: dict[str, Path]) -> Path:
    return seeded_models["moe"]


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved under TP1 EP2 DP4."""
    root = tmp_path_factory.mktemp("saved")
    values(_run(_save, run_config(model, **LAYOUTS["as it was saved"]), root))
    return root / "global_step_1"


def _slices(node: int, checkpoint: Path, config: RunConfig, *options: str) -> str:
    """Runs the command in this process, which was forked for it with all imports made; returns what it prints."""
    slices_command._find_ranges = lambda *args, rng: slices_command._find_ranges_in_child(*args, rng)
    sizes = [
        f"megatron.{key}={value}"
        for key, value in config.megatron.model_dump().items()
        if "parallel_size" in key and value is not None
    ]
    where = ["--node", str(node), "--gpus-per-node", str(PER_NODE)]
    with redirect_stdout(io.StringIO()) as out:
        code = main(["slices", str(checkpoint), f"model.path={config.model.path}", *sizes, *where, *options])
    assert code == 0
    return out.getvalue()


def _copy(node: int, checkpoint: Path, config: RunConfig, root: Path) -> Path:
    target = root / str(node) / checkpoint.name
    _slices(node, checkpoint, config, "--copy-to", str(target))
    return target


def _list(node: int, checkpoint: Path, config: RunConfig) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = json.loads(_slices(node, checkpoint, config, "--json"))
    return found


def _on_each_host(function: Any, *args: Any) -> list[Any]:
    return values(run_ranks(function, SIZE // PER_NODE, *args))


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_host_loads_every_bit_from_its_slice_alone(
    name: str, model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    config = run_config(model, **LAYOUTS[name])
    copies = _on_each_host(_copy, checkpoint, config, tmp_path)
    whole = values(_run(_load, config, [checkpoint] * len(copies)))
    assert values(_run(_load, config, copies)) == whole
    assert len(set(whole)) == SIZE


def test_a_host_cannot_load_from_the_slice_of_another(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Else the test above would not have told a slice from the whole."""
    config = run_config(model, **LAYOUTS["as it was saved"])
    copies = _on_each_host(_copy, checkpoint, config, tmp_path)
    for outcome in _run(_load, config, copies[::-1]):
        assert isinstance(outcome.error, CheckpointError)
        assert "is no archive of torch.save" in str(outcome.error)


def _bytes_of(index: CheckpointIndex, ranges: dict[str, list[list[int]]], prefix: str) -> int:
    """Bytes that a host needs of the tensors whose keys start so."""
    chunks = [chunk for key, entry in index.tensors.items() if key.startswith(prefix) for chunk in entry.chunks]
    places = [chunk.place for chunk in chunks if chunk.place is not None]
    return sum(
        place.length
        for place in places
        if any(start <= place.offset and place.stop <= stop for start, stop in ranges[f"{SHARDS}/{place.file}"])
    )


def test_a_host_needs_all_weights_and_its_share_of_the_optimizer(model: Path, checkpoint: Path) -> None:
    hosts = _on_each_host(_list, checkpoint, run_config(model, **LAYOUTS["as it was saved"]))
    index = read_index(checkpoint)
    everything = {f"{SHARDS}/{path.name}": [[0, path.stat().st_size]] for path in (checkpoint / SHARDS).iterdir()}
    for ranges in hosts:
        assert ranges.keys() == {*everything, MANIFEST}
        assert _bytes_of(index, ranges, "decoder.") == _bytes_of(index, everything, "decoder.") > 0
    # Two hosts of two ranks: what they share of the optimizer is the few chunks on which their ranges meet.
    whole = _bytes_of(index, everything, "optimizer.")
    assert whole <= sum(_bytes_of(index, ranges, "optimizer.") for ranges in hosts) <= 1.1 * whole
