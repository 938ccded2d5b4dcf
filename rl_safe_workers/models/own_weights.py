"""The HF weights that a rank can make of its own shards, without those of other expert or pipeline ranks.

For a weight sync, where each weight is sent by one rank that has it: nothing is gathered but the shards of tensor
parallelism, and nothing is converted that is only a view of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from rl_safe_workers.models.gathering import EXPERT_WEIGHT, Shard, gather, local_shards, named_tensors

Convert = Callable[[str, list[torch.Tensor], Shard], tuple[Sequence[str], Sequence[torch.Tensor]]]
"""Makes HF weights of a parameter's global name and its tensor-parallel shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWeight:
    """HF weights that are made of one parameter, on the ranks of the tensor-parallel group that makes them."""

    place: tuple[int, ...]
    """In the order of sending: pipeline stage, chunk, and first parameter of its kind."""
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    is_split: bool
    """True if to make them is collective."""
    is_source: bool
    """True if this rank is the one of its group that sends them."""
    make: Callable[[], Sequence[torch.Tensor]]
    """Returns them as they are now. Collective over: the tensor or expert-tensor group, if it splits them."""


@dataclass(frozen=True, slots=True)
class _View:
    """How a weight lies in a parameter."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """From the parameter's own beginning, in elements."""

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.as_strided(self.shape, self.stride, parameter.storage_offset() + self.offset)


def own_weights(
    models: Sequence[torch.nn.Module],
    names: Sequence[Mapping[str, str]],
    mpu: Any,
    convert: Convert,
    *,
    num_experts: int,
    leave_out: Callable[[str], bool],
) -> list[OwnWeight]:
    """Lists what this rank takes part in making; nothing on ranks that hold replicas of others' parameters.

    Collective over: the tensor and expert-tensor groups that split parameters, among ranks that hold the first replica.

    Args:
        models: This rank's chunks, expert weights under their fused names.
        names: For each chunk the global name of each local one, experts counted within the rank.
        mpu: mbridge's ParallelStates.
        convert: The bridge's conversion; must need no other parameter.
        num_experts: Experts of a layer; 0 for a dense model.
        leave_out: Whether a global name is not to be sent.
    """
    tensors = [named_tensors(model) for model in models]
    kinds: dict[tuple[int, str], int] = {}
    found = []
    for position, shard in enumerate(local_shards(tensors, names, mpu)):
        if leave_out(shard.name):
            continue
        is_expert = EXPERT_WEIGHT in shard.name
        name, kind = shard.name, shard.name
        if is_expert:
            kind, _, index = shard.name.rpartition(".weight")
            name = f"{kind}.weight{int(index) + mpu.ep_rank * (num_experts // mpu.ep_size)}"
        first = kinds.setdefault((shard.chunk, kind), position)
        if _replica(is_expert=is_expert) > 0:
            continue
        place = (mpu.pp_rank, shard.chunk, first)
        tensor = tensors[shard.chunk][shard.local_name]
        found.append(_own_weight(place, name, tensor, shard, mpu, convert, is_expert=is_expert))
    return found


def _replica(*, is_expert: bool) -> int:
    if is_expert:
        return int(parallel_state.get_expert_data_parallel_rank())
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def _own_weight(
    place: tuple[int, ...],
    name: str,
    parameter: torch.Tensor,
    shard: Shard,
    mpu: Any,
    convert: Convert,
    *,
    is_expert: bool,
) -> OwnWeight:
    group, size, rank = (
        (mpu.etp_group, mpu.etp_size, mpu.etp_rank) if is_expert else (mpu.tp_group, mpu.tp_size, mpu.tp_rank)
    )
    parts = size if is_expert or shard.tensor_model_parallel else 1

    def converted() -> Sequence[torch.Tensor]:
        return convert(name, gather(parameter.detach(), group, parts), shard)[1]

    hf_names, weights = convert(name, gather(parameter.detach(), group, parts), shard)
    views = _views(weights, parameter.detach())
    return OwnWeight(
        place=place,
        names=tuple(hf_names),
        shapes=tuple(tuple(weight.shape) for weight in weights),
        dtype=shard.dtype,
        is_split=parts > 1,
        is_source=rank == 0,
        make=converted if views is None else lambda: [view.of(parameter.detach()) for view in views],
    )


def _views(weights: Sequence[torch.Tensor], parameter: torch.Tensor) -> list[_View] | None:
    """How weights lie in a parameter; None if one of them is a copy."""
    storage = parameter.untyped_storage().data_ptr()
    if any(weight.untyped_storage().data_ptr() != storage for weight in weights):
        return None
    start = int(parameter.storage_offset())
    return [_View(tuple(w.shape), tuple(w.stride()), int(w.storage_offset()) - start) for w in weights]
