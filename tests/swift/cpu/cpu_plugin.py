"""Has ms-swift's Megatron pipelines run on gloo and CPU tensors: a plugin for --external_plugins."""

from __future__ import annotations

import functools
from typing import Any

import torch

from rl_safe_workers.platforms import cpu
from tests.verl import stock_on_cpu

cpu.apply()
stock_on_cpu.make_buffers_on_cpu()
# mcore-bridge seeds Megatron's random states only where there are GPUs (utils/megatron_utils.py:202).
torch.cuda.device_count = lambda: 1


def _on_cpu(make: Any) -> Any:
    return functools.wraps(make)(lambda *args, **kwargs: make(*args, **{**kwargs, "device": "cpu"}))


# ms-swift's warm-up of compiled functions makes its tensors on the GPU (megatron_lm_utils.py:808).
torch.rand = _on_cpu(torch.rand)
_to = torch.Tensor.to


def _to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    args = tuple("cpu" if str(arg).startswith("cuda") else arg for arg in args)
    return _to(self, *args, **kwargs)


# mcore-bridge moves what it gathers to the GPU (bridge/gpt_bridge.py:388).
torch.Tensor.to = _to_cpu  # type: ignore[assignment,method-assign]


def _unpinned(make: Any) -> Any:
    return functools.wraps(make)(lambda *args, **kwargs: make(*args, **{**kwargs, "pin_memory": False}))


# ms-swift offloads to pinned memory (megatron/trainers/utils.py:118), which only a machine with a GPU has.
torch.empty = _unpinned(torch.empty)
