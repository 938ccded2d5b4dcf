"""The Megatron policy computes what one transformers process computes, over every supported layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from rl_safe_workers.trainer.batch import SequenceBatch
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed import reference
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config, served_store

ROWS = 8
LAYOUTS = {
    "tp1_ep2": ("moe", {"ep": 2}),
    "tp2_ep2": ("moe", {"tp": 2, "ep": 2}),
    "pp2_ep2": ("moe", {"pp": 2, "ep": 2}),
    "pp2_ep1": ("moe", {"pp": 2}),
    "pp2_vpp2_ep2": ("deep", {"pp": 2, "vpp": 2, "ep": 2, "ppo_micro_batch_size_per_gpu": 1}),
    "dense_tp2": ("dense", {"tp": 2}),
}


def _parity_rank(
    rank: int, model: str, sizes: dict[str, int], address: StoreAddress, old: np.ndarray
) -> dict[str, object]:
    worker = Worker(run_config(Path(model), **sizes), rank=rank, size=4)
    worker.start(address)
    worker.build()
    exported = {name: tensor.numpy().copy() for name, tensor in worker.export_hf_weights()}
    batch = worker.shard(reference.random_batch(rows=ROWS).with_logprobs(old=old))
    unmasked = replace(batch, response_mask=np.ones_like(batch.response_mask))
    logprobs = worker.compute_logprobs(unmasked)
    logits = _logits(worker, batch)
    metrics = worker.update_policy(batch, mini_batch_size=len(batch))
    updated = {name: tensor.numpy().copy() for name, tensor in worker.export_hf_weights()}
    dp_rank = parallel_state.get_data_parallel_rank()
    worker.teardown()
    return {
        "dp_rank": dp_rank,
        "exported": exported if rank == 0 else None,
        "updated": updated if rank == 0 else None,
        "logprobs": logprobs,
        "logits": logits,
        "grad_norm": metrics[0]["grad_norm"],
    }


@torch.no_grad()
def _logits(worker: Worker, batch: SequenceBatch) -> np.ndarray | None:
    """Whole-vocabulary logits of the first sequence, computed through the pipeline schedule; last stage only."""
    from megatron.core import tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tokens = torch.from_numpy(batch.tokens[:1])

    def step(data, model):
        next(data)
        positions = torch.arange(tokens.shape[1])[None]
        return model(input_ids=tokens, position_ids=positions, attention_mask=None), lambda out: (out.sum() * 0, out)

    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter([0, 0]) for _ in worker.chunks],
        model=worker.chunks,
        num_microbatches=2,
        seq_length=tokens.shape[1],
        micro_batch_size=1,
        forward_only=True,
    )
    if not parallel_state.is_pipeline_last_stage():
        return None
    return tensor_parallel.gather_from_tensor_model_parallel_region(results[0]).numpy()


@pytest.fixture(scope="module", params=LAYOUTS)
def parity(request, seeded_models):
    kind, sizes = LAYOUTS[request.param]
    model = seeded_models[kind]
    batch = reference.random_batch(rows=ROWS)
    old = reference.logprobs(reference.load(model), batch).detach().numpy() * batch.response_mask
    with served_store() as address:
        return model, values(run_ranks(_parity_rank, 4, str(model), sizes, address, old))


def test_logits_equal_those_of_transformers(parity):
    model, ranks = parity
    batch = reference.random_batch(rows=ROWS)
    with torch.no_grad():
        expected = reference.load(model)(input_ids=torch.from_numpy(batch.tokens)).logits.numpy()
    held = [r for r in ranks if r["logits"] is not None]
    assert held
    for r in held:
        first_row = r["dp_rank"] * (ROWS // len({x["dp_rank"] for x in ranks}))
        assert np.abs(r["logits"][0] - expected[first_row]).max() <= 5e-6


def test_logprobs_equal_those_of_transformers(parity):
    model, ranks = parity
    batch = reference.random_batch(rows=ROWS)
    expected = reference.logprobs(reference.load(model), batch).detach().numpy()
    by_dp = {r["dp_rank"]: r["logprobs"] for r in ranks if r["logprobs"] is not None}
    got = np.concatenate([by_dp[i] for i in sorted(by_dp)])
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 5e-6


def test_exported_weights_are_bit_equal_to_the_files(parity):
    model, ranks = parity
    expected, got = load_file(model / "model.safetensors"), ranks[0]["exported"]
    assert got.keys() == expected.keys()
    assert all(np.array_equal(got[name], expected[name].numpy()) for name in expected)


def test_a_grpo_step_equals_the_step_of_one_process(parity):
    model, ranks = parity
    hf, batch = reference.load(model), reference.random_batch(rows=ROWS)
    before = load_file(model / "model.safetensors")
    norm = reference.grpo_step(hf, batch, run_config(model).actor)
    expected, got = reference.hf_weights(hf), ranks[0]["updated"]
    difference = max(np.abs(got[n] - expected[n].numpy()).max() for n in expected)
    moved = max(np.abs(got[n] - before[n].numpy()).max() for n in expected)
    assert moved > 1e-5
    assert difference <= 1e-6
    assert all(abs(r["grad_norm"] - norm) <= 1e-4 * norm for r in ranks)
