"""Computes advantages from rewards."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rl_safe_workers.config import AdvEstimator, AlgorithmConfig
from rl_safe_workers.trainer.batch import Floats

_EPS = 1e-6


def grpo_advantages(rewards: Floats, *, normalize_by_std: bool) -> Floats:
    """Returns group-relative advantages (arXiv:2402.03300, section 4.1.2).

    Args:
        rewards: ``[groups, n]``, n samples of each prompt.
        normalize_by_std: Divide by the group's sample standard deviation; False is the variant of arXiv:2503.20783.

    Returns:
        ``[groups, n]``; 0 for a group whose rewards are all equal.
    """
    centred = _centred(rewards)
    if normalize_by_std:
        centred /= centred.std(axis=1, keepdims=True, ddof=1) + _EPS
    return centred


def _centred(rewards: Floats) -> Floats:
    # Relative to the group's first reward. Otherwise the rounded mean of equal rewards may differ from them, and the
    # division by their standard deviation would amplify the difference.
    relative = rewards - rewards[:, :1]
    centred: Floats = relative - relative.mean(axis=1, keepdims=True)
    return centred


def rloo_advantages(rewards: Floats) -> Floats:
    """Returns each reward minus the mean of its group's other rewards (arXiv:2402.14740). Shapes: `grpo_advantages`."""
    n = rewards.shape[1]
    leave_one_out: Floats = _centred(rewards) * n / (n - 1)
    return leave_one_out


def estimate_advantages(rewards: ArrayLike, *, group_size: int, config: AlgorithmConfig) -> Floats:
    """Applies the configured estimator.

    Args:
        rewards: ``[groups * group_size]``, samples of one prompt side by side.
        group_size: Samples per prompt, at least 2.
        config: Names the estimator.

    Returns:
        ``[groups * group_size]``, fp32.
    """
    grouped = np.asarray(rewards, np.float32).reshape(-1, group_size)
    if config.adv_estimator is AdvEstimator.rloo:
        return rloo_advantages(grouped).reshape(-1)
    return grpo_advantages(grouped, normalize_by_std=config.norm_adv_by_std_in_grpo).reshape(-1)
