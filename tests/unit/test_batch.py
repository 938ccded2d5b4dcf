"""Samples, packed for the trainers."""

from __future__ import annotations

import numpy as np

from rl_safe_workers.rollout.protocol import Sample
from rl_safe_workers.trainer.batch import pack

LAYERS, TOP_K = 3, 2


def _sample(prompt: int, response: int, *, has_experts: bool = True) -> Sample:
    tokens = prompt + response - 1
    experts = np.arange(tokens * LAYERS * TOP_K, dtype=np.uint8).reshape(tokens, LAYERS, TOP_K)
    return Sample(
        prompt_ids=list(range(1, prompt + 1)),
        response_ids=list(range(11, response + 11)),
        logprobs=[-float(i + 1) for i in range(response)],
        text="",
        routed_experts=experts if has_experts else None,
    )


def test_prompts_and_responses_lie_side_by_side_and_padding_behind() -> None:
    batch = pack([_sample(2, 3), _sample(1, 1)], np.array([0.5, -0.5]), length=6)
    assert batch.tokens.tolist() == [[1, 2, 11, 12, 13, 0], [1, 11, 0, 0, 0, 0]]
    assert batch.response_mask.tolist() == [[0, 0, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert batch.rollout_logprobs.tolist() == [[0, 0, -1, -2, -3, 0], [0, -1, 0, 0, 0, 0]]
    assert batch.advantages.tolist() == [0.5, -0.5]


def test_every_token_has_the_experts_that_the_rollout_has_sent_it_to() -> None:
    samples = [_sample(2, 3), _sample(1, 2)]
    batch = pack(samples, np.zeros(2), length=6)
    assert batch.routed_experts is not None
    assert batch.routed_experts.shape == (2, 6, LAYERS, TOP_K)
    assert batch.routed_experts.dtype == np.uint8
    for row, sample in enumerate(samples):
        known = len(sample.prompt_ids) + len(sample.response_ids) - 1
        assert np.array_equal(batch.routed_experts[row, :known], sample.routed_experts)


def test_the_last_token_and_the_padding_go_where_the_token_before_them_goes() -> None:
    batch = pack([_sample(1, 2)], np.zeros(1), length=5)
    assert batch.routed_experts is not None
    assert all(np.array_equal(batch.routed_experts[0, t], batch.routed_experts[0, 1]) for t in (2, 3, 4))


def test_rows_keep_their_experts() -> None:
    batch = pack([_sample(2, 3), _sample(3, 2)], np.zeros(2), length=5)
    assert batch.routed_experts is not None
    rows = np.array([1])
    assert np.array_equal(batch.select(rows).routed_experts, batch.routed_experts[rows])


def test_without_replay_there_are_no_experts() -> None:
    batch = pack([_sample(2, 3, has_experts=False)], np.zeros(1), length=5)
    assert batch.routed_experts is None
    assert batch.select(slice(0, 1)).routed_experts is None
