"""Tensors that try what a digest must take, as parts of larger tensors too, and the digests that numpy computes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rl_safe_workers.rollout.digest import Span
from tests.slow_digest import slow_digest


class Case(NamedTuple):
    """Tensors whose digests add up to one number."""

    tensors: list[torch.Tensor]
    spans: list[Span]
    expected: int


class Parts(NamedTuple):
    """A tensor, the bytes of its parts, and the digest of each part."""

    tensor: torch.Tensor
    sizes: list[int]
    expected: list[int]


def cut_tensors() -> dict[str, Parts]:
    """Returns tensors with parts that have digests of their own, by name. They are on the CPU."""
    generator = torch.Generator().manual_seed(0)
    whole, odd = torch.randn(6, 2048, generator=generator), torch.randn(15, generator=generator).bfloat16()
    found = {
        "two matrices": (whole, [2, 4]),
        "no word in one of them": (whole, [3, 0, 3]),
        "of half words": (odd, [5, 3, 7]),
        "not contiguous": (whole.t()[:6], [1, 2, 3]),
        "one": (whole, [6]),
    }
    return {
        name: Parts(
            tensor,
            [count * tensor.nbytes // len(tensor) for count in rows],
            [slow_digest(part) for part in tensor.contiguous().split(rows)],
        )
        for name, (tensor, rows) in found.items()
    }


def cases() -> dict[str, Case]:
    """Returns the cases by name. Their tensors are on the CPU."""

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)

    large, odd = random(300, 513), random(5, 7, dtype=torch.bfloat16)
    whole = {
        "of several programs of a kernel": large,
        "of whole blocks": random(3, 2048),
        "of one word": random(1),
        "without words": random(0),
        "a last word that is half full": odd,
        "at an odd address": odd.flatten()[1:],
        "of another dtype": random(64, dtype=torch.float64),
        "transposed": large.t(),
    }
    found = {name: Case([tensor], [Span()], slow_digest(tensor)) for name, tensor in whole.items()}
    words, half = large.shape[1] - 1, (large.shape[1] - 1) // 2
    columns = list(large[:, :words].contiguous().chunk(2, dim=1))
    spans = [Span(start=first, width=half, stride=words) for first in (0, half)]
    found["in halves of columns"] = Case(columns, spans, slow_digest(torch.cat(columns, dim=1)))
    rows = list(large.chunk(4))
    spans = [Span(start=number * rows[0].numel()) for number in range(4)]
    found["in quarters of rows"] = Case(rows, spans, slow_digest(large))
    return found
