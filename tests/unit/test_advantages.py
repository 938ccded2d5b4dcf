"""Advantages against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rl_safe_workers.config import AdvEstimator, AlgorithmConfig
from rl_safe_workers.trainer.advantages import estimate_advantages

GRPO, MEAN_ONLY = AlgorithmConfig(), AlgorithmConfig(norm_adv_by_std_in_grpo=False)
RLOO = AlgorithmConfig(adv_estimator=AdvEstimator.rloo)
TOLERANCE = 1e-5
"""Difference that the small number may make which keeps the division safe."""


def test_grpo_divides_by_the_sample_standard_deviation_of_the_group() -> None:
    # Mean 2, deviations -1, 0, 1; sample variance (1 + 0 + 1) / 2 = 1.
    assert estimate_advantages([1, 2, 3], group_size=3, config=GRPO) == pytest.approx([-1, 0, 1], abs=TOLERANCE)
    # Mean 1, deviations ±1; sample variance 2.
    expected = [-(0.5**0.5), 0.5**0.5]
    assert estimate_advantages([0, 2], group_size=2, config=GRPO) == pytest.approx(expected, abs=TOLERANCE)


def test_grpo_without_the_division_only_centres() -> None:
    advantages = estimate_advantages([0, 2, 4, 10], group_size=4, config=MEAN_ONLY)
    assert advantages.tolist() == [-4, -2, 0, 6]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    # 0 - (2 + 4) / 2, 2 - (0 + 4) / 2, 4 - (0 + 2) / 2
    assert estimate_advantages([0, 2, 4], group_size=3, config=RLOO) == pytest.approx([-3, 0, 3], abs=1e-6)
    assert estimate_advantages([1, 5], group_size=2, config=RLOO) == pytest.approx([-4, 4], abs=1e-6)


@pytest.mark.parametrize("config", [GRPO, MEAN_ONLY, RLOO], ids=["grpo", "mean_only", "rloo"])
def test_equal_rewards_teach_nothing(config: AlgorithmConfig) -> None:
    # The mean of seven 7.3 is not 7.3 in single precision, and the rest is as large as its standard deviation.
    for reward in (0.0, 0.1, 1.0, 7.3):
        assert not estimate_advantages([reward] * 7, group_size=7, config=config).any()


@pytest.mark.parametrize("config", [GRPO, MEAN_ONLY, RLOO], ids=["grpo", "mean_only", "rloo"])
def test_groups_do_not_see_each_other(config: AlgorithmConfig) -> None:
    alone = [estimate_advantages(group, group_size=2, config=config) for group in ([0, 1], [5, 3])]
    together = estimate_advantages([0, 1, 5, 3], group_size=2, config=config)
    assert together.tolist() == np.concatenate(alone).tolist()


def test_the_result_is_flat_and_in_single_precision() -> None:
    advantages = estimate_advantages(np.arange(6, dtype=np.float64), group_size=3, config=GRPO)
    assert advantages.shape == (6,)
    assert advantages.dtype == np.float32


def test_rewards_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="reshape"):
        estimate_advantages([1, 2, 3], group_size=2, config=GRPO)
