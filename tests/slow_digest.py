"""The digest of a tensor as numpy computes it, without code of the package."""

from __future__ import annotations

import numpy as np
import torch


def slow_digest(tensor: torch.Tensor) -> int:
    """Returns the digest of a tensor on the CPU as a signed number of 64 bits."""
    data = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 4), np.uint32)
    mixed = words ^ (np.arange(len(words), dtype=np.uint32) * np.uint32(2654435761))
    for shift, factor in ((16, 2246822507), (13, 3266489909), (16, 1)):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return int(mixed.view(np.int32).sum(dtype=np.int64))
