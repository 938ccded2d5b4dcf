"""The contents of a training rank's checkpoint, in Megatron's sharded form.

    {"model": {name: ShardedTensor},              or "model0", "model1", ... with virtual pipeline stages
     "optimizer": {"optimizer": {"param_groups": ...}, "param_state": {name: ShardedTensor},
                   "param_state_sharding_type": "fully_reshardable"},       by number where Megatron chains several
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
    # Optimizer state as tensors of the parameters' shapes; the default, fully_sharded_model_space, raises since 0.16.
    "distrib_optim_sharding_type": FULLY_RESHARDABLE,
    # A tensor for each layer, not one for all: a tensor's chunks are planned together, at a cost above linear.
    "non_homogeneous_layers": True,
    # The experts of a layer in one tensor, not one each.
    "singleton_local_shards": False,
    # Keys do not name the optimizer of Megatron's chain that they are of: the chain depends on the layout.
    "chained_optim_avoid_prefix": True,
}
"""Megatron's description of a checkpoint's format; saved with it, stock frameworks choose by it how to load."""


def chunk_keys(chunks: Sequence[Any]) -> list[str]:
    """Megatron-LM's keys of the model chunks; those of the tensors do not depend on them."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


class StateLayout:
    """Where all of a rank's state lies in global tensors: built once, then only the views are made anew.

    Args:
        chunks: Model chunks wrapped in DistributedDataParallel.
        optimizer: Megatron's DistributedOptimizer, with its state allocated.
        metadata: A format like `CONTENT_METADATA`.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, metadata: dict[str, Any]) -> None:
        self.metadata = dict(metadata)
        self._chunk_ids = [id(chunk) for chunk in chunks]
        # A copy with the group: Megatron writes it into the dict that it is given (transformer/utils.py:205).
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        # Of what DistributedDataParallel wraps: its own load passes the keys on without its prefix.
        self._chunks = [
            ChunkLayout(chunk, chunk.module.sharded_state_dict(metadata={**metadata, "dp_cp_group": group}))
            for chunk in chunks
        ]
        self._parts: list[OptimizerLayout] | None = None
        if metadata.get("distrib_optim_sharding_type") == FULLY_RESHARDABLE and is_in_place(optimizer):
            windows = {key: value for chunk in self._chunks for key, value in chunk.windows().items()}
            self._parts = [OptimizerLayout(part, windows) for part in parts_of(optimizer)]

    def is_current(self, chunks: Sequence[Any], metadata: dict[str, Any] | None) -> bool:
        """Returns True if the model's tensors are still those that it was built of."""
        return (
            metadata in (None, self.metadata)
            and self._chunk_ids == [id(chunk) for chunk in chunks]
            and all(chunk.is_current() for chunk in self._chunks)
        )

    def model(self) -> dict[str, dict[str, Any]]:
        """The model's part of the state dict. Not collective."""
        return {key: chunk.shards() for key, chunk in zip(chunk_keys(self._chunks), self._chunks, strict=True)}

    def optimizer(self) -> dict[Any, Any] | None:
        """The optimizer's part; None if it is for Megatron to describe. Not collective."""
        if self._parts is None:
            return None
        states = [{**common_state(layout.part), "param_state": layout.shards()} for layout in self._parts]
        return states[0] if len(states) == 1 else dict(enumerate(states))


_LAYOUT = "_rl_safe_layout"


def state_layout(chunks: Sequence[Any], optimizer: Any, metadata: dict[str, Any] | None = None) -> StateLayout:
    """The layout of a rank's state; kept on the optimizer, to live and die with it. Not collective.

    Args:
        chunks: Model chunks wrapped in DistributedDataParallel.
        optimizer: Megatron's DistributedOptimizer.
        metadata: A format; None for that of the last call, or else `CONTENT_METADATA`.

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

    Not collective with `CONTENT_METADATA` and any optimizer whose state lies in memory as it is stored; else Megatron
    describes the optimizer, Collective over: the training world.

    Args:
        chunks: Model chunks wrapped in DistributedDataParallel.
        optimizer: Megatron's DistributedOptimizer.
        training_rank: This process's rank.
        size: Number of trainers.
        is_loading: Whether the result describes what to load.
        metadata: The format, if not `CONTENT_METADATA`: that of the checkpoint to load.
        rng: Whether to include the random state, which belongs to a rank of a layout: leave it out of a load under
            another layout, or of a checkpoint that others wrote.

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
    """Puts a loaded state dict in place: what `sharded_state` described with ``is_loading``, loaded. Not collective.

    Tensors that the loader wrote where they belong are left alone, and need not be in ``state`` at all. Without
    ``rng_state`` the random state stays what the seed made it.
    """
    layout = state_layout(chunks, optimizer)
    for (key, live), chunk in zip(layout.model().items(), chunks, strict=True):
        _put(live, state.get(key, {}))
        _put_extra_state(chunk, state.get(key, {}))
    _restore_optimizer(layout.optimizer(), optimizer, state["optimizer"])
    if "rng_state" in state:
        set_rng_state(state["rng_state"])
    else:
        logger.info("the random state of another layout is not taken over: it stays as the seed made it")


def _put(live: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Copies tensors that were not loaded in place."""
    for name, shard in live.items():
        tensor = loaded.get(name)
        if not isinstance(shard, ShardedTensor) or not isinstance(tensor, torch.Tensor):
            continue
        if tensor.data_ptr() != shard.data.data_ptr():
            shard.data.copy_(tensor)


def _put_extra_state(chunk: Any, loaded: dict[str, Any]) -> None:
    """Gives layers the extra state that is not a tensor of theirs; only Transformer Engine's have any."""
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

    It puts the count before the load over the loaded one (distrib_optimizer.py:1674, 940), in one tensor that all
    parameters share and each of them would then count up (distrib_optimizer.py:825).
    """
    for part, of_part in zip(parts_of(optimizer), saved_parts(loaded), strict=True):
        if is_torch_adam(part):
            set_adam_steps(part, float(of_part["optimizer"]["param_groups"][0]["step"]))


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        # A copy even on CPU: numpy() would leave the storage of the tensor itself unfit for an offload's resize.
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
        # With bf16 the fp32 parameters live here alone.
        _update(digest, [group["params"] for group in part.optimizer.param_groups])
    _update(digest, rng_state())
    return digest.hexdigest()
