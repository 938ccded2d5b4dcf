"""The random state of a training rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


def rng_state() -> dict[str, Any]:
    """Returns this process's random state: Python, numpy, torch, and Megatron's tracker.

    It consists of tensors, numbers and strings only, so that ``torch.load(weights_only=True)`` reads it. Numpy's arrays
    would need a pickle that can run code.
    """
    name, keys, *rest = np.random.get_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": {k: v.get_state() if isinstance(v, torch.Generator) else v for k, v in tracker.items()},
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores what `rng_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.cuda.set_rng_state(state["cuda"])
    torch.set_rng_state(state["torch"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = dict(state["tracker"])
    for key, generator in tracker.get_states().items():
        if isinstance(generator, torch.Generator):  # with CUDA graphs, the states are the generators themselves
            generator.set_state(states[key])
            states[key] = generator
    tracker.set_states(states)
