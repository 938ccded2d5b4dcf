"""Loads a state dict into layers that Megatron-Bridge has given adapters.

Its wrapper keeps the layer as ``to_wrap`` and the adapter as ``adapter``. In its state dict, the layer's tensors have
the names that they had without an adapter (peft/adapter_wrapper.py:147 in 0.6.2). Torch cannot load them by these
names. Bridge itself loads a layer before it wraps it, and later loads only the adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

_HALVES = (".adapter_up", ".adapter_gate")
"""Ends of the names of CanonicalLoRA's adapters of the two halves of ``linear_fc1``."""
_LAYER, _ADAPTER, _OUTER = "to_wrap", "adapter", "module."


def load_layers(chunk: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Loads a state dict into a model chunk, adapters included. Not collective.

    Args:
        chunk: May be wrapped in DistributedDataParallel, or in Float16Module.
        state: Tensors by their names in the chunk's own ``state_dict``.
    """
    wrappers = {_inner(name) for name, module in chunk.named_modules() if _LAYER in module._modules}
    chunk.load_state_dict({_with_layer(name, wrappers): value for name, value in state.items()} if wrappers else state)


def layout_bound(chunks: Iterable[torch.nn.Module]) -> str:
    """Returns the name of an adapter that loads only under the layout of its save; empty if all load under any layout.

    CanonicalLoRA has one adapter for each half of ``linear_fc1``. Bridge describes each as if it held both halves
    (peft/utils.py:1516 in 0.6.2), so the order of its rows in a checkpoint depends on tensor parallelism.
    """
    names = (name for chunk in chunks for name, _ in chunk.named_modules())
    return next((_inner(name) for name in names if name.endswith(_HALVES)), "")


def _inner(name: str) -> str:
    """Returns the name without the parts for wrappers around the model, which state dicts omit."""
    while name.startswith(_OUTER):
        name = name.removeprefix(_OUTER)
    return name


def _with_layer(name: str, wrappers: set[str]) -> str:
    """Returns torch's name of a tensor: a tensor of a layer with an adapter has one more part in its name."""
    parts = name.split(".")
    for length in range(1, len(parts)):
        if ".".join(parts[:length]) in wrappers and parts[length] != _ADAPTER:
            return ".".join([*parts[:length], _LAYER, *parts[length:]])
    return name
