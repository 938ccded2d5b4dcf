"""On a machine with a GPU the shims of the CPU platform stay off."""

from __future__ import annotations

import pytest
import torch

from rl_safe_workers.errors import ResourceError
from rl_safe_workers.platforms import cpu


def test_the_shims_are_refused_where_a_gpu_is_seen() -> None:
    before = torch.cuda.current_device
    with pytest.raises(ResourceError, match="CUDA_VISIBLE_DEVICES"):
        cpu.apply()
    assert torch.cuda.current_device is before
    assert torch.zeros(1, device="cuda").is_cuda
