"""On a GPU the digests of weights come from one kernel, and are those that numpy computes."""

from __future__ import annotations

import pytest
import torch

from rl_safe_workers.rollout import digest
from tests.digest_cases import cases


def test_the_kernel_can_be_built() -> None:
    assert digest._kernel(torch.device("cuda", 0)) is not None


@pytest.mark.parametrize("name", cases())
def test_numpy_finds_the_same(name: str) -> None:
    tensors, spans, expected = cases()[name]
    assert int(digest.digests([tensor.cuda() for tensor in tensors], spans).sum()) == expected
