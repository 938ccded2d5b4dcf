"""Digests: every bit and every place counts, in each batch alike, and an independent function finds the same."""

from __future__ import annotations

import pytest
import torch

from rl_safe_workers.rollout import digest
from rl_safe_workers.rollout.digest import Span, digests_of
from tests.slow_digest import slow_digest


def of(tensor: torch.Tensor) -> int:
    return int(digests_of([tensor]))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("at_once", [3, 64, 2**14])
def test_a_slow_function_finds_the_same(dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(digest._AT_ONCE, "cpu", at_once)
    tensors = [random(5, 7, dtype=dtype), random(0), random(3), random(1, dtype=dtype), random(8, 8, dtype=dtype).t()]
    assert digests_of(tensors).tolist() == [slow_digest(tensor) for tensor in tensors]


def test_no_tensors_have_no_digests() -> None:
    assert digests_of([]).tolist() == []


@pytest.mark.parametrize("bit", [0, 15, 16, 31])
@pytest.mark.parametrize("place", [0, 1, 99])
def test_a_flipped_bit_shows(bit: int, place: int) -> None:
    tensor = random(100)
    before = of(tensor)
    tensor.view(torch.int32)[place] ^= torch.tensor(1 << bit).to(torch.int32)
    assert of(tensor) != before


def test_a_transposed_tensor_shows() -> None:
    assert of(random(16, 16)) != of(random(16, 16).t())


def test_swapped_rows_show_even_if_their_sums_are_equal() -> None:
    rows = torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 3.0]])
    assert len({of(rows), of(rows[[1, 0, 2]]), of(rows[[2, 1, 0]]), of(rows[[0, 2, 1]])}) == 4


def test_another_dtype_shows() -> None:
    tensor = random(64)
    assert len({of(tensor), of(tensor.bfloat16()), of(tensor.half()), of(tensor.double())}) == 4


def test_a_view_at_an_odd_place_has_the_digest_of_its_copy() -> None:
    tensor = random(9, dtype=torch.bfloat16)
    assert of(tensor[1:]) == of(tensor[1:].clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [3, 64, 2**14])
def test_the_digests_of_parts_add_up_to_that_of_the_whole(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(digest._AT_ONCE, "cpu", at_once)
    matrices = [random(6, 8, dtype=dtype), random(10, 16, dtype=dtype)]
    parts, spans = [], []
    for matrix in matrices:
        words = matrix.shape[1] * matrix.itemsize // 4
        for half in range(2):
            parts.append(matrix.chunk(2, dim=1)[half])
            spans.append(Span(start=half * words // 2, width=words // 2, stride=words))
            parts.append(matrix.chunk(2)[half])
            spans.append(Span(start=half * len(matrix) // 2 * words))
    found = digests_of(parts, spans).view(2, 2, 2)
    for number, matrix in enumerate(matrices):
        assert found[number].sum(0).tolist() == [slow_digest(matrix)] * 2
