"""On a GPU the digests of weights come from one kernel, and are those that numpy computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rl_safe_workers.rollout import digest, read_back
from rl_safe_workers.rollout.protocol import WeightSpec
from rl_safe_workers.rollout.read_back import ReadBack
from rl_safe_workers.rollout.sent_digests import SentDigests
from tests.digest_cases import cases, cut_tensors


def test_the_kernel_can_be_built() -> None:
    assert digest._kernel(torch.device("cuda", 0)) is not None


@pytest.mark.parametrize("name", cases())
def test_numpy_finds_the_same(name: str) -> None:
    tensors, spans, expected = cases()[name]
    assert int(digest.digests_of([tensor.cuda() for tensor in tensors], spans).sum()) == expected


def test_numpy_finds_the_same_for_parts_of_tensors() -> None:
    cut = cut_tensors()
    found = digest.digests_of([of.tensor.cuda() for of in cut.values()], sizes=[of.sizes for of in cut.values()])
    assert found.tolist() == [one for of in cut.values() for one in of.expected]


def test_digests_of_weights_on_two_streams_are_those_of_the_weights() -> None:
    weights = {str(number): torch.full((2**20,), float(number), device="cuda") for number in range(40)}
    expected = dict(zip(weights, digest.digests_of([*weights.values()]).tolist(), strict=True))
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


@pytest.mark.parametrize("at_once_bytes", [0, 2**30])
def test_digests_of_weights_that_pass_are_those_of_the_weights(at_once_bytes: int) -> None:
    weights = {str(number): torch.full((2**10,), float(number), device="cuda") for number in range(4)}
    found = SentDigests()
    for _ in found.passing(iter(weights.items()), at_once_bytes=at_once_bytes):
        pass
    assert list(found.sent().digests.values()) == digest.digests_of([*weights.values()]).tolist()


def test_prepared_digests_are_those_of_the_memory_as_it_is_now() -> None:
    tensors = [torch.arange(size, device="cuda", dtype=torch.float32) for size in (5, 70_000, 2**20)]
    take = digest.prepared(tensors)
    assert take is not None
    for tensor in tensors:
        tensor.add_(1)
        assert take().tolist() == digest.digests_of(tensors).tolist()


def test_a_tensor_that_must_be_copied_is_not_prepared() -> None:
    assert digest.prepared([torch.arange(8, device="cuda")[::2]]) is None


def test_a_model_is_read_back_whether_or_not_its_layout_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a wider dtype, the copies of the weights must live until the kernel has read them."""
    others: list[torch.Tensor] = []

    def read(self: ReadBack, layout: Any) -> dict[int, int]:
        others.extend(torch.full((256, 256), -1.0, device="cuda", dtype=torch.bfloat16) for _ in names)
        return of_class(self, layout)

    of_class = ReadBack._read
    monkeypatch.setattr(ReadBack, "_read", read)
    names = [f"{number}.weight" for number in range(20)]
    specs = [WeightSpec(name=name, dtype="bfloat16", shape=(256, 256)) for name in names]
    for dtype in (torch.bfloat16, torch.float32):
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in names]).cuda().to(dtype)
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            expected = digest.digests_of([parameter.detach().bfloat16() for parameter in model.parameters()]).tolist()
            assert dict(ReadBack(model, specs).finish().digests) == dict(zip(names, expected, strict=True))
        assert (model in read_back._LAST_LAYOUT) is (dtype == torch.bfloat16)
