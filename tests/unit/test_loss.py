"""The policy loss against a plain loop over tokens."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from rl_safe_workers.config import ActorConfig

Rows = list[list[float]]
CLIP = 0.2


def one_token(logprob: float, old: float, advantage: float, ref: float | None, config: ActorConfig) -> dict[str, float]:
    """Loss, KL and whether the clip took hold, by the definitions."""
    ratio = math.exp(logprob - old)
    clipped = min(max(ratio, 1 - config.clip_ratio), 1 + config.clip_ratio)
    objective = min(ratio * advantage, clipped * advantage)
    kl = 0.0 if ref is None else math.exp(ref - logprob) - (ref - logprob) - 1
    return {
        "total": -objective + config.kl_loss_coef * kl,
        "kl": kl,
        "clipped": float(objective < ratio * advantage),
        "tokens": 1,
    }


def by_hand(
    logprobs: Rows, old: Rows, advantages: list[float], mask: Rows, config: ActorConfig, ref: Rows | None
) -> dict[str, float]:
    sums = dict.fromkeys(("total", "kl", "clipped", "tokens"), 0.0)
    for row, advantage in enumerate(advantages):
        for column, is_response in enumerate(mask[row]):
            if is_response:
                before = None if ref is None else ref[row][column]
                token = one_token(logprobs[row][column], old[row][column], advantage, before, config)
                sums = {key: sums[key] + token[key] for key in sums}
    return sums


def loss(
    logprobs: Rows, old: Rows, advantages: list[float], mask: Rows, config: ActorConfig, ref: Rows | None = None
) -> Any:
    """The loss in double precision, and the gradient with respect to the log-probabilities."""
    torch = pytest.importorskip("torch")
    from rl_safe_workers.trainer.loss import policy_loss

    def tensor(values: Any) -> Any:
        return torch.tensor(values, dtype=torch.float64)

    current = tensor(logprobs).requires_grad_()
    result = policy_loss(
        current, tensor(old), tensor(advantages), tensor(mask), config, ref=None if ref is None else tensor(ref)
    )
    result.total.backward()
    return result, current.grad.tolist()


def of_one_token(logprob: float, old: float, advantage: float) -> tuple[float, float, float]:
    """Loss, gradient and clip count of a single response token."""
    result, gradient = loss([[logprob]], [[old]], [advantage], [[1]], ActorConfig(clip_ratio=CLIP))
    return result.total.item(), gradient[0][0], result.clipped.item()


def random_rows(seed: int, *, rows: int = 3, length: int = 7) -> tuple[Rows, Rows, list[float], Rows, Rows]:
    draw = random.Random(seed)

    def table(low: float, high: float) -> Rows:
        return [[draw.uniform(low, high) for _ in range(length)] for _ in range(rows)]

    mask = [[float(draw.random() < 0.6) for _ in range(length)] for _ in range(rows)]
    return table(-2, -0.5), table(-2, -0.5), [draw.uniform(-2, 2) for _ in range(rows)], mask, table(-2, -0.5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("use_kl_loss", [False, True])
def test_it_is_the_sum_over_response_tokens(seed: int, use_kl_loss: bool) -> None:
    config = ActorConfig(clip_ratio=CLIP, use_kl_loss=use_kl_loss, kl_loss_coef=0.3)
    logprobs, old, advantages, mask, ref = random_rows(seed)
    result, _ = loss(logprobs, old, advantages, mask, config, ref if use_kl_loss else None)
    expected = by_hand(logprobs, old, advantages, mask, config, ref if use_kl_loss else None)
    assert {key: getattr(result, key).item() for key in expected} == pytest.approx(expected, rel=1e-12)
    assert 0 < expected["clipped"] < expected["tokens"] < 21


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "clipped"),
    [
        (1.5, 1.0, -1.2, 1),  # better than average and already much likelier: no further
        (1.1, 1.0, -1.1, 0),
        (0.5, 1.0, -0.5, 0),  # better than average and less likely: all the way back
        (0.5, -1.0, 0.8, 1),  # worse than average and already much less likely: no further
        (0.9, -1.0, 0.9, 0),
        (1.5, -1.0, 1.5, 0),  # worse than average and likelier: all the way back
    ],
)
def test_the_clip_stops_only_what_goes_too_far(ratio: float, advantage: float, expected: float, clipped: int) -> None:
    total, gradient, count = of_one_token(math.log(ratio), 0.0, advantage)
    assert total == pytest.approx(expected)
    assert count == clipped
    # d(ratio) / d(logprob) is the ratio itself.
    assert gradient == pytest.approx(0.0 if clipped else -advantage * ratio)


def test_at_a_ratio_of_one_the_gradient_is_the_negative_advantage() -> None:
    _, gradient = loss([[-1.0, -2.0]], [[-1.0, -2.0]], [0.7], [[1, 1]], ActorConfig())
    assert gradient == [[-0.7, -0.7]]


def test_a_token_outside_the_response_counts_for_nothing() -> None:
    config = ActorConfig(use_kl_loss=True, kl_loss_coef=1.0)
    # Far enough off to overflow, were it not left out before the exponential.
    result, gradient = loss([[-1.0, 900.0]], [[-1.0, 0.0]], [1.0], [[1, 0]], config, [[-1.0, -900.0]])
    assert result.total.item() == -1.0
    assert int(result.tokens) == 1
    assert gradient[0][1] == 0.0


@pytest.mark.parametrize("difference", [-3.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 3.0])
def test_the_kl_estimate_is_never_negative_and_pulls_back(difference: float) -> None:
    config = ActorConfig(use_kl_loss=True, kl_loss_coef=1.0)
    result, gradient = loss([[-2.0 + difference]], [[-2.0 + difference]], [0.0], [[1]], config, [[-2.0]])
    assert result.kl.item() >= 0.0
    assert result.kl.item() == pytest.approx(math.exp(-difference) + difference - 1, abs=1e-12)
    assert math.copysign(1, gradient[0][0]) == math.copysign(1, difference) or difference == 0


def test_a_kl_loss_without_starting_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="log-probabilities under the starting weights"):
        loss([[0.0]], [[0.0]], [1.0], [[1]], ActorConfig(use_kl_loss=True))


def test_kl_is_zero_when_it_is_not_asked_for() -> None:
    result, _ = loss([[-1.0]], [[-2.0]], [1.0], [[1]], ActorConfig(), [[-9.0]])
    assert result.kl.item() == 0.0


def test_the_statistics_carry_no_gradient_and_the_count_is_an_integer() -> None:
    torch = pytest.importorskip("torch")
    result, _ = loss([[-1.0]], [[-2.0]], [1.0], [[1]], ActorConfig())
    assert result.total.requires_grad
    assert [t.requires_grad for t in (result.kl, result.clipped, result.tokens)] == [False] * 3
    assert result.tokens.dtype is torch.int32
