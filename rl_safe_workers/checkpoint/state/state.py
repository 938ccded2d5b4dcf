"""The contents of a training rank's checkpoint, in Megatron's sharded form.

    {"model": {name: ShardedTensor},              or "model0", "model1", ... with virtual pipeline stages
     "optimizer": {"optimizer": {"param_groups": ...}, "param_state": {name: ShardedTensor},
                   "param_state_sharding_type": "fully_reshardable"},       one by number for each chained optimizer
     "rng_state": ShardedObject}

Every ShardedTensor is a view of the live tensor: a save copies nothing to describe it, and a load writes in place.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from rl_safe_workers.checkpoint.state.adapted_layers import load_layers
from rl_safe_workers.checkpoint.state.chunk_state import ChunkLayout
from rl_safe_workers.checkpoint.state.layer_states import EXTRA_STATE, extra_states
from rl_safe_workers.checkpoint.state.optimizer_state import (
    FULLY_RESHARDABLE,
    OptimizerLayout,
    allocate_state,
    common_state,
    is_in_place,
    is_torch_adam,
    parts_of,
    restore_common,
    saved_parts,
    set_adam_steps,
)
from rl_safe_workers.checkpoint.state.rng import rng_state, set_rng_state

logger = logging.getLogger(__name__)

CONTENT_METADATA: dict[str, Any] = {
    # Store optimizer state in the parameters' shapes. The default, fully_sharded_model_space, raises since 0.16.
    "distrib_optim_sharding_type": FULLY_RESHARDABLE,
    # One tensor for each layer, not one for all: the plan of one tensor's chunks takes more than linear time.
    "non_homogeneous_layers": True,
    # One tensor for all experts of a layer, not one for each.
    "singleton_local_shards": False,
    # Keys do not contain the number of the chained optimizer, because the chain depends on the layout.
    "chained_optim_avoid_prefix": True,
}
"""Megatron's description of a checkpoint's format. A save stores it, and other frameworks read it to choose how to
load."""


def chunk_keys(chunks: Sequence[Any]) -> list[str]:
    """Returns Megatron-LM's keys of the model chunks. The keys of tensors do not depend on them."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


class StateLayout:
    """The places of a rank's state in global tensors. It is built once; each save only makes new views.

    Args:
        chunks: Model chunks wrapped in DistributedDataParallel.
        optimizer: Megatron's DistributedOptimizer, with its state allocated.
        metadata: A format like `CONTENT_METADATA`.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, metadata: dict[str, Any]) -> None:
        self.metadata = dict(metadata)
        self._chunk_ids = [id(chunk) for chunk in chunks]
        # Copy the dict and add the group: Megatron would write the group into the caller's (transformer/utils.py:205).
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        # Use the wrapped modules: the load of DistributedDataParallel passes the keys on without its prefix.
        self._chunks = [
            ChunkLayout(chunk, chunk.module.sharded_state_dict(metadata={**metadata, "dp_cp_group": group}))
            for chunk in chunks
        ]
        self._parts: list[OptimizerLayout] | None = None
        if metadata.get("distrib_optim_sharding_type") == FULLY_RESHARDABLE and is_in_place(optimizer):
            windows = {key: value for chunk in self._chunks for key, value in chunk.windows().items()}
            self._parts = [OptimizerLayout(part, windows) for part in parts_of(optimizer)]

    def is_current(self, chunks: Sequence[Any], metadata: dict[str, Any] | None) -> bool:
        """Returns True if the chunks and their tensors are still those of this layout, and the format is the same."""
        return (
            metadata in (None, self.metadata)
            and self._chunk_ids == [id(chunk) for chunk in chunks]
            and all(chunk.is_current() for chunk in self._chunks)
        )

    def model(self) -> dict[str, dict[str, Any]]:
        """Returns the model's part of the state dict. Not collective."""
        return {key: chunk.shards() for key, chunk in zip(chunk_keys(self._chunks), self._chunks, strict=True)}

    def optimizer(self) -> dict[Any, Any] | None:
        """Returns the optimizer's part; None if Megatron must describe it. Not collective."""
        if self._parts is None:
            return None
        states = [{**common_state(layout.part), "param_state": layout.shards()} for layout in self._parts]
        return states[0] if len(states) == 1 else dict(enumerate(states))


_LAYOUT = "_rl_safe_layout"


def state_layout(chunks: Sequence[Any], optimizer: Any, metadata: dict[str, Any] | None = None) -> StateLayout:
    """Returns the layout of a rank's state. Keeps it on the optimizer, so that it lives as long. Not collective.

    Args:
        chunks: Model chunks wrapped in DistributedDataParallel.
        optimizer: Megatron's DistributedOptimizer.
        metadata: A format; None for the format of the last call, or `CONTENT_METADATA` at the first.

    Raises:
        CheckpointError: If a parameter is stored in a form that rectangles cannot describe.
    """
    layout: StateLayout | None = getattr(optimizer, _LAYOUT, None)
    if layout is None or not layout.is_current(chunks, metadata):
        if metadata is None:
            metadata = layout.metadata if layout else CONTENT_METADATA
        layout = StateLayout(chunks, optimizer, metadata)
        setattr(optimizer, _LAYOUT, layout)
    return layout


@torch.no_grad()
def sharded_state(
    chunks: Sequence[Any],
    optimizer: Any,
    *,
    training_rank: int,
    size: int,
    is_loading: bool,
    metadata: dict[str, Any] | None = None,
    rng: bool = True,
) -> dict[str, Any]:
    """Describes model, optimizer and random state, to be saved or loaded.

    Not collective with `CONTENT_METADATA`, if the optimizer's state has the same form in memory as in a checkpoint.
    Else Megatron describes the optimizer. Collective over: the training world.

    Args:
        chunks: Model chunks wrapped in DistributedDataParallel.
        optimizer: Megatron's DistributedOptimizer.
        training_rank: This process's rank.
        size: Number of trainers.
        is_loading: Whether the result describes what to load.
        metadata: The format of the checkpoint to load; None for `CONTENT_METADATA`.
        rng: Whether to include the random state. It belongs to one rank of one layout. So leave it out when you load
            under another layout, or load a checkpoint from another program.

    Raises:
        CheckpointError: If a parameter is stored in a form that rectangles cannot describe.
    """
    allocate_state(optimizer)
    layout = state_layout(chunks, optimizer, CONTENT_METADATA if metadata is None else metadata)
    state: dict[str, Any] = dict(layout.model())
    of_optimizer = layout.optimizer()
    if of_optimizer is None:
        of_optimizer = _stock_optimizer_state(chunks, optimizer, layout.metadata, is_loading=is_loading)
    state["optimizer"] = of_optimizer
    if rng:
        state["rng_state"] = ShardedObject("rng_state", rng_state(), (size,), (training_rank,), replica_id=0)
    return state


def _stock_optimizer_state(
    chunks: Sequence[Any], optimizer: Any, metadata: dict[str, Any], *, is_loading: bool
) -> dict[Any, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**metadata, "dp_cp_group": group}
    model = {str(i): chunk.module.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
    state: dict[Any, Any] = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return state


@torch.no_grad()
def restore_state(chunks: Sequence[Any], optimizer: Any, state: dict[str, Any]) -> None:
    """Restores the loaded state dict that `sharded_state` described with ``is_loading``. Not collective.

    Tensors that the loader wrote in place are left alone, and may be missing in ``state``. Without ``rng_state``, the
    random state stays as the seed made it.
    """
    layout = state_layout(chunks, optimizer)
    for (key, live), chunk in zip(layout.model().items(), chunks, strict=True):
        _put(live, state.get(key, {}))
        _put_extra_state(chunk, state.get(key, {}))
    _restore_optimizer(layout.optimizer(), optimizer, state["optimizer"])
    if "rng_state" in state:
        set_rng_state(state["rng_state"])
    else:
        logger.info("the random state is not loaded, because it is of another layout; the state from the seed stays")


def _put(live: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Copies tensors that were not loaded in place."""
    for name, shard in live.items():
        tensor = loaded.get(name)
        if not isinstance(shard, ShardedTensor) or not isinstance(tensor, torch.Tensor):
            continue
        if tensor.data_ptr() != shard.data.data_ptr():
            shard.data.copy_(tensor)


def _put_extra_state(chunk: Any, loaded: dict[str, Any]) -> None:
    """Gives layers their extra states. Only Transformer Engine's layers have any."""
    extra = {name: value for name, value in loaded.items() if EXTRA_STATE in name}
    if extra:
        load_layers(chunk, {**chunk.module.state_dict(keep_vars=True), **extra})


def _restore_optimizer(live: dict[Any, Any] | None, optimizer: Any, loaded: dict[Any, Any]) -> None:
    if live is None:
        optimizer.load_state_dict(loaded)
        _undo_shared_steps(optimizer, loaded)
        return
    if "param_state" in live:
        _put(live["param_state"], loaded.get("param_state", {}))
    else:
        for index, part in live.items():
            _put(part["param_state"], loaded.get(index, {}).get("param_state", {}))
    restore_common(optimizer, loaded)


def _undo_shared_steps(optimizer: Any, loaded: dict[Any, Any]) -> None:
    """Undoes what Megatron's load does to the step count of torch's Adam.

    It overwrites the loaded count with the count before the load (distrib_optimizer.py:1674, 940). It also puts the
    count into one tensor that all parameters share, which each of them would then increment (distrib_optimizer.py:825).
    """
    for part, of_part in zip(parts_of(optimizer), saved_parts(loaded), strict=True):
        if is_torch_adam(part):
            set_adam_steps(part, float(of_part["optimizer"]["param_groups"][0]["step"]))


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        # Copy even on CPU: after numpy() on the tensor itself, an offload could not resize its storage.
        host = value.detach().to("cpu", copy=True)
        digest.update(host.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        digest.update(value.tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _update(digest, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _update(digest, item)
    else:
        digest.update(repr(value).encode())


def state_digest(chunks: Sequence[Any], optimizer: Any) -> str:
    """Digest of every bit of this rank's parameters, extra states, optimizer state and random state. Not collective."""
    digest = hashlib.sha256()
    for chunk in chunks:
        for name, parameter in sorted(chunk.named_parameters()):
            digest.update(name.encode())
            _update(digest, parameter)
        for name, value in sorted(extra_states(chunk).items()):
            digest.update(name.encode())
            _update(digest, value)
    for part in parts_of(optimizer):
        inner = part.optimizer.state_dict()
        _update(digest, inner["state"])
        _update(digest, [{k: v for k, v in g.items() if k != "params"} for g in inner["param_groups"]])
        # With bf16, only the optimizer has the fp32 parameters.
        _update(digest, [group["params"] for group in part.optimizer.param_groups])
    _update(digest, rng_state())
    return digest.hexdigest()
