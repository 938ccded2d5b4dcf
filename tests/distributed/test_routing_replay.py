"""Routing replay: the trainers send every token where they are told to, and learn there, over every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

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

ROWS, LAYERS, EXPERTS, TOP_K = 8, 2, 8, 2
LAYOUTS = {"tp1_ep2": {"ep": 2}, "tp2_ep2": {"tp": 2, "ep": 2}, "pp2_ep2": {"pp": 2, "ep": 2}}


def _batch() -> SequenceBatch:
    """Sequences with a random choice of experts for every token of every layer, which no router would make."""
    batch = reference.random_batch(rows=ROWS)
    rng = np.random.default_rng(1)
    chances = rng.random((*batch.tokens.shape, LAYERS, EXPERTS))
    return replace(batch, routed_experts=np.argsort(chances, axis=-1)[..., :TOP_K].astype(np.uint8))


def _forced(path: Path, batch: SequenceBatch) -> torch.nn.Module:
    """The transformers model with the batch's choice in place of its routers' own."""
    model = reference.load(path)
    for number, layer in enumerate(model.model.layers):
        chosen = torch.from_numpy(batch.routed_experts[:, :, number].astype(np.int64)).reshape(-1, TOP_K)

        def forward(self: Any, hidden: torch.Tensor, chosen: torch.Tensor = chosen) -> Any:
            logits = torch.nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
            probs = torch.softmax(logits, -1).gather(1, chosen)
            return logits, probs / probs.sum(-1, keepdim=True), chosen

        assert (layer.mlp.gate.num_experts, layer.mlp.gate.top_k) == (EXPERTS, TOP_K)
        layer.mlp.gate.forward = MethodType(forward, layer.mlp.gate)
    return model


def _replay_rank(rank: int, model: str, sizes: dict[str, int], address: StoreAddress, old: np.ndarray) -> dict:
    config = run_config(Path(model), **sizes, ppo_micro_batch_size_per_gpu=1)
    config.rollout.enable_rollout_routing_replay = True
    worker = Worker(config, rank=rank, size=4)
    worker.start(address)
    worker.build()
    batch = worker.shard(_batch().with_logprobs(old=old))
    batch = replace(batch, response_mask=np.ones_like(batch.response_mask))
    found = {
        "replayed": worker.compute_logprobs(batch),
        "free": worker.compute_logprobs(replace(batch, routed_experts=None)),
        "dp_rank": parallel_state.get_data_parallel_rank(),
    }
    worker.update_policy(worker.shard(_batch().with_logprobs(old=old)), mini_batch_size=len(batch))
    found["updated"] = {name: tensor.numpy().copy() for name, tensor in worker.export_hf_weights()}
    worker.teardown()
    return found


@pytest.fixture(scope="module", params=LAYOUTS)
def replay(request, seeded_models):
    model, batch = seeded_models["moe"], _batch()
    old = reference.logprobs(_forced(model, batch), batch).detach().numpy() * batch.response_mask
    with served_store() as address:
        return model, values(run_ranks(_replay_rank, 4, str(model), LAYOUTS[request.param], address, old))


def _whole(ranks: list[dict], key: str) -> np.ndarray:
    by_dp = {r["dp_rank"]: r[key] for r in ranks if r[key] is not None}
    return np.concatenate([by_dp[i] for i in sorted(by_dp)])


def test_logprobs_are_those_of_the_experts_that_were_given(replay):
    model, ranks = replay
    expected = reference.logprobs(_forced(model, _batch()), _batch()).detach().numpy()
    assert np.abs(_whole(ranks, "replayed") - expected).max() <= 5e-6


def test_without_a_choice_the_routers_make_their_own(replay):
    model, ranks = replay
    expected = reference.logprobs(reference.load(model), _batch()).detach().numpy()
    assert np.abs(_whole(ranks, "free") - expected).max() <= 5e-6
    assert np.abs(_whole(ranks, "free") - _whole(ranks, "replayed")).max() > 1e-3


def test_a_step_trains_the_experts_that_were_given(replay):
    model, ranks = replay
    batch = _batch()
    hf, before = _forced(model, batch), load_file(model / "model.safetensors")
    reference.grpo_step(hf, batch, run_config(model).actor)
    expected, got = reference.hf_weights(hf), ranks[0]["updated"]
    assert max(np.abs(got[n] - before[n].numpy()).max() for n in expected) > 1e-5
    assert max(np.abs(got[n] - expected[n].numpy()).max() for n in expected) <= 1e-6
