"""Makes the extra state of a layer safe to give to the layer.

Transformer Engine keeps the scales of 8-bit layers as bytes, and unpickles them when it loads a state dict
(transformer_engine/pytorch/module/base.py:881, as of 2.12). Bytes from a checkpoint could execute anything there, even
in a run without 8-bit layers. So this module reads the bytes without executing them, and pickles their values anew.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from rl_safe_workers.checkpoint.format.unpickle import read_layer_tree
from rl_safe_workers.checkpoint.state.values import make_value
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_files import MALFORMED, described

EXTRA_STATE = "_extra_state"
"""Part of the key of every extra state. torch names it so."""


def safe_layer_state(value: Any, key: str) -> Any:
    """Returns an equal extra state that executes nothing when a layer unpickles it.

    Args:
        value: The checkpoint's value of the key. Transformer Engine unpickles the bytes of a uint8 tensor, which is
            empty without 8-bit layers. Any other value is returned as it is.
        key: Its key, for errors.

    Raises:
        UnsafeCheckpointError: If it asks for a name that no layer's state needs; the message has the name.
        CheckpointError: If it is damaged, or needs a class that is not installed here.
    """
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.uint8 or not value.numel():
        return value
    return pickled(layer_state_value(value, key))


def extra_states(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the values of the extra states of a model's layers, by the layer's name. Omits empty ones.

    Compare these values, not the bytes: equal scales have other bytes in each process, since a pickle names storages by
    their addresses.
    """
    layers = ((name, layer) for name, layer in model.named_modules() if type(layer).get_extra_state is not _NO_STATE)
    states = ((f"{name}.{EXTRA_STATE}", layer.get_extra_state()) for name, layer in layers)
    return {
        name: layer_state_value(state, name)
        for name, state in states
        if isinstance(state, torch.Tensor) and state.numel()
    }


_NO_STATE = torch.nn.Module.get_extra_state


def pickled(value: Any) -> torch.Tensor | None:
    """Returns a value in the form that Transformer Engine's ``set_extra_state`` takes."""
    return None if value is None else torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def layer_state_value(state: torch.Tensor, key: str) -> Any:
    """Returns the value of an extra state: a recipe, scales and plain values. Errors as `safe_layer_state`."""
    tree = read_layer_tree(state.cpu().numpy().tobytes(), source=key)
    try:
        made, _ = make_value(tree, _no_records)
    except (*MALFORMED, RuntimeError, ImportError) as error:
        raise CheckpointError(
            f"{key} cannot be read: it is damaged, or needs a class that is not installed here ({described(error)}); "
            "use another checkpoint"
        ) from error
    return made


def _no_records(name: str) -> int:
    raise ValueError(f"a storage {name} beside the pickle")
