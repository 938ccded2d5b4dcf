"""Copies many tensors in one launch. ``torch._foreach_copy_`` is private. Seen in torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies ``sources[i]`` into ``targets[i]``, of the same shape, for every i. Does not wait for a GPU."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
