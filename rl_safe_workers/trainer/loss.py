"""The clipped policy loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_safe_workers.config import ActorConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """Sums over the response tokens of a micro-batch. Divide by ``tokens`` for means."""

    total: Tensor
    """Scalar with gradient: the loss to minimise."""
    tokens: Tensor
    """int32 scalar: number of response tokens."""
    kl: Tensor
    """Scalar: KL estimate from the starting weights; 0 without a KL loss."""
    clipped: Tensor
    """Scalar: number of tokens whose ratio was clipped."""


def policy_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig, *, ref: Tensor | None = None
) -> PolicyLoss:
    """Returns PPO's clipped loss on group-relative advantages, summed over tokens, with an optional KL term.

    The KL estimate is the non-negative, unbiased k3 of http://joschu.net/blog/kl-approx.html, which GRPO uses
    (arXiv:2402.03300, equation 4).

    Args:
        logprobs: ``[b, s]``, nats, with gradient: under the current weights.
        old: ``[b, s]``, nats: under the weights that the update starts from.
        advantages: ``[b]``
        mask: ``[b, s]``; 1 for response tokens.
        config: Clip range and KL coefficient.
        ref: ``[b, s]``, nats: under the starting weights; required with a KL loss.
    """
    mask = mask.to(logprobs.dtype)
    ratio = torch.exp((logprobs - old) * mask)
    clipped_ratio = ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
    advantage = advantages[:, None]
    objective = torch.minimum(ratio * advantage, clipped_ratio * advantage)
    loss, kl = -objective, torch.zeros_like(objective)
    if config.use_kl_loss:
        if ref is None:
            raise ValueError("a KL loss needs the log-probabilities under the starting weights")
        log_ratio = (ref - logprobs) * mask
        kl = torch.exp(log_ratio) - log_ratio - 1
        loss = loss + config.kl_loss_coef * kl
    return PolicyLoss(
        total=(loss * mask).sum(),
        tokens=mask.sum().to(torch.int32),
        kl=(kl * mask).sum().detach(),
        clipped=((clipped_ratio * advantage < ratio * advantage) * mask).sum().detach(),
    )
