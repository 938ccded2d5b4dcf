"""Digests of weights on their way out: of each, in its order, before it goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_safe_workers.rollout.digest import digests
from rl_safe_workers.rollout.read_back import obstacle
from rl_safe_workers.rollout.sent_digests import SentDigests

WEIGHTS = {f"layers.{number}.weight": torch.arange(number + 3, dtype=torch.float32) for number in range(7)}


@pytest.mark.parametrize("at_once_bytes", [0, 40, 10**6])
def test_weights_pass_in_their_order_and_their_digests_are_those_of_before(at_once_bytes: int) -> None:
    found = SentDigests()
    passed = []
    weights = ((name, tensor.clone()) for name, tensor in WEIGHTS.items())
    for name, tensor in found.passing(weights, at_once_bytes=at_once_bytes):
        passed.append((name, tensor.clone()))
        tensor.fill_(-1)
    assert [name for name, _ in passed] == list(WEIGHTS)
    assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in passed)
    assert found.sent(found.names).digests == dict(zip(WEIGHTS, digests(list(WEIGHTS.values())).tolist(), strict=True))


@pytest.mark.parametrize("at_once_bytes", [0, 40])
def test_no_more_weights_are_held_than_fit(at_once_bytes: int) -> None:
    taken = []

    def weights() -> Any:
        for name, tensor in WEIGHTS.items():
            taken.append(tensor)
            yield name, tensor

    passing = SentDigests().passing(weights(), at_once_bytes=at_once_bytes)
    ahead = [sum(one.nbytes for one in taken[passed:]) for passed, _ in enumerate(passing)]
    assert max(ahead) <= at_once_bytes + max(tensor.nbytes for tensor in WEIGHTS.values())


def test_a_sync_without_weights_has_no_digests() -> None:
    assert SentDigests().sent([]).digests == {}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"parallel_config": SimpleNamespace(world_size=2)}, "it has more than one GPU"),
        ({"quant_config": object()}, "its weights are quantised"),
        ({"lora_config": object()}, "it is sent LoRA adapters"),
        ({"model_config": SimpleNamespace(is_multimodal_model=True)}, "its model is multimodal"),
    ],
)
def test_an_engine_that_cannot_be_read_back_says_why(changed: dict[str, Any], reason: str | None) -> None:
    plain = {
        "parallel_config": SimpleNamespace(world_size=1),
        "quant_config": None,
        "lora_config": None,
        "model_config": SimpleNamespace(is_multimodal_model=False),
    }
    assert obstacle(SimpleNamespace(**plain | changed)) == reason
