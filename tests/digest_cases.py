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
