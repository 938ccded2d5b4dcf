"""On a GPU the digests of weights come from one kernel, and are those that numpy computes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rl_safe_workers.rollout import digest
from rl_safe_workers.rollout.sent_digests import SentDigests
from tests.digest_cases import cases, cut_tensors


def test_the_kernel_can_be_built() -> None:
    assert digest._kernel(torch.device("cuda", 0)) is not None


@pytest.mark.parametrize("name", cases())
def test_numpy_finds_the_same(name: str) -> None:
    tensors, spans, expected = cases()[name]
    assert int(digest.digests([tensor.cuda() for tensor in tensors], spans).sum()) == expected


def test_numpy_finds_the_same_for_parts_of_tensors() -> None:
    cut = cut_tensors()
    found = digest.digests([of.tensor.cuda() for of in cut.values()], sizes=[of.sizes for of in cut.values()])
    assert found.tolist() == [one for of in cut.values() for one in of.expected]


def test_digests_of_weights_on_two_streams_are_those_of_the_weights() -> None:
    weights = {str(number): torch.full((2**20,), float(number), device="cuda") for number in range(40)}
    expected = dict(zip(weights, digest.digests([*weights.values()]).tolist(), strict=True))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each weight some time before its values are there."""
        for name, weight in weights.items():
            later = torch.zeros_like(weight)
            torch.cuda._sleep(10**6)
            yield name, later.add_(weight)

    found = SentDigests()
    passing = found.passing_on_their_streams(made())
    for number in range(len(weights) + 1):
        with torch.cuda.stream(streams[number // 5 % 2]):
            streams[number // 5 % 2].synchronize()
            next(passing, None)
    assert found.sent().digests == expected
