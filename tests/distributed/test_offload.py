"""Offload gives memory back, and onload puts every bit where it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rl_safe_workers.config import RunConfig
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config, served_store

SIZE = 4


def _storages(worker: Worker) -> dict[str, list[torch.Tensor]]:
    """The tensors that own the memory of parameters, gradients and optimizer state."""
    buffers = [b for chunk in worker.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parts = [part.optimizer for part in worker.optimizer.chained_optimizers]
    states = [s for part in parts for s in part.state.values()]
    main = [p for part in parts for group in part.param_groups for p in group["params"]]
    in_fp32 = all(b.param_data.dtype is torch.float32 for b in buffers)
    return {
        "param": [b.param_data for b in buffers],
        "grad": [b.grad_data for b in buffers],
        "optimizer": [s[key] for s in states for key in ("exp_avg", "exp_avg_sq")] + ([] if in_fp32 else main),
    }


def _bytes(worker: Worker) -> dict[str, int]:
    found = {}
    for kind, tensors in _storages(worker).items():
        storages = [tensor.untyped_storage() for tensor in tensors]
        # Several tensors may share one.
        found[kind] = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    return found


def _worker(rank: int, address: StoreAddress, config: RunConfig) -> Worker:
    worker = Worker(config, rank=rank, size=SIZE)
    worker.start(address)
    worker.convert()
    random.seed(0)  # part of the digest, and Python seeds it anew in every process
    worker.step(reference.random_batch(rows=8))
    return worker


def _round_trip(rank: int, address: StoreAddress, config: RunConfig) -> dict[str, Any]:
    worker = _worker(rank, address, config)
    bytes_before, digest_before = _bytes(worker), worker.digest()
    freed = [worker.offload(), worker.offload()]
    bytes_between = _bytes(worker)
    worker.onload()
    digest_after = worker.digest()
    worker.onload()
    metrics = [worker.step(reference.random_batch(rows=8, seed=seed)) for seed in (1, 2)]
    return {
        "freed": freed,
        "bytes": (bytes_before, bytes_between, _bytes(worker)),
        "digests": (digest_before, digest_after),
        "stepped": (metrics, worker.digest()),
    }


def _no_offload(rank: int, address: StoreAddress, config: RunConfig) -> Any:
    worker = _worker(rank, address, config)
    return [worker.step(reference.random_batch(rows=8, seed=seed)) for seed in (1, 2)], worker.digest()


def _run(function: Any, config: RunConfig) -> list[Any]:
    with served_store() as address:
        return values(run_ranks(function, SIZE, address, config))


LAYOUTS = {"tp1_ep2": {"ep": 2}, "tp2_ep2": {"tp": 2, "ep": 2}, "bf16": {"ep": 2}}


@pytest.fixture(scope="module", params=LAYOUTS)
def config(request, seeded_models) -> RunConfig:
    config = run_config(seeded_models["moe"], **LAYOUTS[request.param])
    if request.param == "bf16":
        # The optimizer then has main parameters of its own.
        config.model.dtype = "bfloat16"
    return config


@pytest.fixture(scope="module")
def ranks(config: RunConfig) -> list[dict[str, Any]]:
    return _run(_round_trip, config)


def test_an_offload_frees_all_of_it_and_says_how_many_bytes(ranks) -> None:
    for rank in ranks:
        before, between, _ = rank["bytes"]
        assert min(before.values()) > 100_000
        assert between == {"param": 0, "grad": 0, "optimizer": 0}
        assert rank["freed"][0] == sum(before.values())


def test_a_second_offload_frees_nothing_and_loses_nothing(ranks) -> None:
    assert [rank["freed"][1] for rank in ranks] == [0] * SIZE


def test_an_onload_takes_the_same_memory_again(ranks) -> None:
    assert all(rank["bytes"][2] == rank["bytes"][0] for rank in ranks)


def test_an_onload_brings_back_every_bit(ranks) -> None:
    for rank in ranks:
        before, after = rank["digests"]
        assert after == before


def test_steps_after_an_offload_are_bit_for_bit_those_without(config, ranks) -> None:
    assert [rank["stepped"] for rank in ranks] == _run(_no_offload, config)


def _partly(rank: int, address: StoreAddress, config: RunConfig, kept: str) -> tuple[dict[str, int], str, str]:
    setattr(config.megatron, f"{kept}_offload", False)
    worker = _worker(rank, address, config)
    before = worker.digest()
    worker.offload()
    sizes = _bytes(worker)
    worker.onload()
    return sizes, before, worker.digest()


@pytest.mark.parametrize("kept", ["param", "grad", "optimizer"])
def test_what_the_configuration_keeps_stays(kept: str, address, seeded_models) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    for sizes, before, after in values(run_ranks(_partly, SIZE, address, config, kept)):
        assert [kind for kind, size in sizes.items() if size > 0] == [kept]
        assert after == before


def _save_between(rank: int, address: StoreAddress, config: RunConfig, root: Any) -> bool:
    """A digest and a checkpoint must not stand in the way of the next offload."""
    worker = _worker(rank, address, config)
    worker.save_checkpoint(root, step=1, fingerprint="", layout={}, driver_state={})
    worker.compute_logprobs(worker.shard(reference.random_batch(rows=8)))
    for _, _weight in worker.export_hf_weights():
        pass
    worker.digest()
    worker.offload()
    return sum(_bytes(worker).values()) == 0


def test_a_save_an_export_and_a_digest_do_not_stand_in_its_way(address, seeded_models, tmp_path) -> None:
    config = run_config(seeded_models["moe"], ep=2)
    config.rl_safe.checkpoint.digest = True
    assert values(run_ranks(_save_between, SIZE, address, config, tmp_path)) == [True] * SIZE
