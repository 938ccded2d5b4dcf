"""Packs sampled sequences into batches for the trainers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_safe_workers.rollout.protocol import Sample

Floats = NDArray[np.float32]
Experts = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """``n`` right-padded sequences of ``length`` tokens. Position ``t`` of every array is about token ``t``."""

    tokens: NDArray[np.int64]
    """``[n, length]``; padding is 0."""
    response_mask: Floats
    """``[n, length]``; 1 where the token is part of the response."""
    rollout_logprobs: Floats
    """``[n, length]``, nats; 0 outside the response."""
    advantages: Floats
    """``[n]``"""
    old_logprobs: Floats | None = None
    """``[n, length]``, nats: under the weights before the update."""
    ref_logprobs: Floats | None = None
    """``[n, length]``, nats: under the starting weights; only with a KL loss."""
    routed_experts: Experts | None = None
    """``[n, length, layers, top_k]``: where the rollout has sent each token; only with routing replay."""

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, rows: slice | NDArray[np.int64]) -> SequenceBatch:
        """Returns the given rows."""
        return SequenceBatch(
            tokens=self.tokens[rows],
            response_mask=self.response_mask[rows],
            rollout_logprobs=self.rollout_logprobs[rows],
            advantages=self.advantages[rows],
            old_logprobs=None if self.old_logprobs is None else self.old_logprobs[rows],
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[rows],
            routed_experts=None if self.routed_experts is None else self.routed_experts[rows],
        )

    def with_logprobs(self, *, old: Floats | None = None, ref: Floats | None = None) -> SequenceBatch:
        """Returns a copy with the given log-probabilities set."""
        batch = self if old is None else replace(self, old_logprobs=old)
        return batch if ref is None else replace(batch, ref_logprobs=ref)


def pack(samples: Sequence[Sample], advantages: Floats, *, length: int) -> SequenceBatch:
    """Packs samples into one batch.

    Args:
        samples: ``n`` samples of at most ``length`` tokens each.
        advantages: ``[n]``.
        length: Tokens per row.
    """
    n = len(samples)
    tokens = np.zeros((n, length), np.int64)
    mask, logprobs = np.zeros((n, length), np.float32), np.zeros((n, length), np.float32)
    for row, sample in enumerate(samples):
        start, stop = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.response_ids)
        tokens[row, :start] = sample.prompt_ids
        tokens[row, start:stop] = sample.response_ids
        mask[row, start:stop] = 1
        logprobs[row, start:stop] = sample.logprobs
    return SequenceBatch(
        tokens=tokens,
        response_mask=mask,
        rollout_logprobs=logprobs,
        advantages=advantages.astype(np.float32),
        routed_experts=_pack_experts(samples, length=length),
    )


def _pack_experts(samples: Sequence[Sample], *, length: int) -> Experts | None:
    """Packs the tokens' experts. Padding gets the experts of the last token that has any. Nothing depends on those."""
    if not samples or samples[0].routed_experts is None:
        return None
    rows = []
    for sample in samples:
        assert sample.routed_experts is not None, "the rollout returns all samples' experts or none's"
        missing = length - len(sample.routed_experts)
        rows.append(np.pad(sample.routed_experts, ((0, missing), (0, 0), (0, 0)), mode="edge"))
    return np.stack(rows)
