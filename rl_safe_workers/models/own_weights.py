"""Lists the HF weights that a tensor-parallel group can build from its own shards, without other EP or PP ranks.

In a weight sync, one rank that has a weight sends it. Only tensor-parallel shards are gathered. A weight that is a view
of a parameter is not converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.comms.json_gather import gather_json
from rl_safe_workers.models.gathering import EXPERT_WEIGHT, Shard, gather, local_shards, named_tensors
from rl_safe_workers.rollout.packing import dtype_name

Convert = Callable[[str, list[torch.Tensor], Shard], tuple[Sequence[str], Sequence[torch.Tensor]]]
"""Converts a parameter's global name, its tensor-parallel shards and its description to HF names and weights."""
Announced = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Shape and dtype of every HF weight of an export, by name."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of parameters whose memory is read as it is. A quantised parameter has a class of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWeight:
    """The HF weights built from one parameter, on the ranks of the tensor-parallel group that builds them."""

    place: tuple[int, ...]
    """Sort key for the order of sending: pipeline stage, chunk, and position of the first parameter of its kind."""
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    is_split: bool
    """True if building them is collective, because tensor parallelism splits the parameter."""
    is_source: bool
    """True if this rank sends them for its group."""
    make: Callable[[], Sequence[torch.Tensor]]
    """Builds them from the parameter's current values. Collective over: the tensor or expert-tensor group, if
    ``is_split``."""
    parameter: torch.Tensor | None = None
    """The parameter, if its memory is exactly these weights, one after another; else None."""


@dataclass(frozen=True, slots=True)
class _View:
    """The position of a weight in a parameter's memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Offset in elements from the beginning of the parameter."""

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
    """Lists the weights that this rank helps to build. Leaves out a parameter if another rank has its first replica.

    Collective over: the tensor and expert-tensor groups that split parameters, among the ranks with the first replica
    (data-parallel rank 0, for experts expert-data-parallel rank 0).

    Args:
        models: This rank's chunks, with expert weights under their fused names.
        names: For each chunk, the global name of each local name. Expert numbers count within the rank.
        mpu: mbridge's ParallelStates.
        convert: The bridge's conversion. It must not need another parameter.
        num_experts: Number of experts per layer; 0 for a dense model.
        leave_out: Returns True for a global name that must not be sent.
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
        if not is_first_replica(is_expert=is_expert):
            continue
        place = (mpu.pp_rank, shard.chunk, first)
        tensor = tensors[shard.chunk][shard.local_name]
        found.append(_of_shard(place, name, tensor, shard, mpu, convert, is_expert=is_expert))
    return found


def is_first_replica(*, is_expert: bool) -> bool:
    """Returns True if this rank has the first of the data-parallel replicas of its parameters.

    Args:
        is_expert: True for the parameters of experts, which have replicas of their own.
    """
    if is_expert:
        return int(parallel_state.get_expert_data_parallel_rank()) == 0
    return int(parallel_state.get_data_parallel_rank(with_context_parallel=True)) == 0


def _of_shard(
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
    return own_weight(
        place,
        parameter,
        lambda: convert(name, gather(parameter.detach(), group, parts), shard),
        is_split=parts > 1,
        is_source=rank == 0,
    )


def own_weight(
    place: tuple[int, ...],
    parameter: torch.Tensor,
    convert: Callable[[], tuple[Sequence[str], Sequence[torch.Tensor]]],
    *,
    is_split: bool,
    is_source: bool,
) -> OwnWeight:
    """Describes the HF weights that are built from one parameter. Builds them once.

    Collective over: the tensor or expert-tensor group, if ``is_split``.

    Args:
        place: As `OwnWeight.place`.
        parameter: The parameter.
        convert: Returns the HF names and weights for the parameter's current values. Weights in the parameter's own
            memory are converted only now. Later they are read where they are.
        is_split: As `OwnWeight.is_split`.
        is_source: As `OwnWeight.is_source`.
    """
    names, weights = convert()
    is_plain = type(parameter) in PLAIN
    views = _views(weights, parameter.detach()) if is_plain else None
    return OwnWeight(
        place=place,
        names=tuple(names),
        shapes=tuple(tuple(weight.shape) for weight in weights),
        dtypes=tuple(weight.dtype for weight in weights),
        is_split=is_split and views is None,
        is_source=is_source,
        make=(lambda: convert()[1]) if views is None else lambda: [view.of(parameter.detach()) for view in views],
        parameter=parameter if is_plain and _is_all_of(parameter, weights) else None,
    )


def _views(weights: Sequence[torch.Tensor], parameter: torch.Tensor) -> list[_View] | None:
    """Returns the positions of weights in a parameter's memory; None if a weight is a copy."""
    storage = parameter.untyped_storage().data_ptr()
    if any(weight.untyped_storage().data_ptr() != storage for weight in weights):
        return None
    start = int(parameter.storage_offset())
    return [_View(tuple(w.shape), tuple(w.stride()), int(w.storage_offset()) - start) for w in weights]


def _is_all_of(parameter: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Returns True if a parameter's memory is exactly these weights, one after another.

    A parameter that is one weight must also have that weight's shape.
    """
    address = parameter.data_ptr()
    for weight in weights:
        if weight.data_ptr() != address or not weight.is_contiguous():
            return False
        address += weight.nbytes
    if not parameter.is_contiguous() or address != parameter.data_ptr() + parameter.nbytes:
        return False
    return len(weights) != 1 or weights[0].shape == parameter.shape


def difference_from_export(own: Sequence[OwnWeight], announced: Announced) -> str | None:
    """Compares the weights that all ranks build with those of an export. Collective over: the training world.

    Returns:
        A text that names the first difference, or None if they are equal. Every rank returns the same.
    """
    mine = [
        (name, [*shape], dtype_name(dtype))
        for weight in own
        if weight.is_source
        for name, shape, dtype in zip(weight.names, weight.shapes, weight.dtypes, strict=True)
    ]
    built: dict[str, tuple[list[int], str]] = {}
    for name, shape, dtype in (entry for of_rank in gather_json(mine, group=dist.group.WORLD) for entry in of_rank):  # type: ignore[arg-type]
        if name in built:
            return f"{name} would be built twice"
        built[name] = shape, dtype
    wanted = {name: ([*shape], dtype_name(dtype)) for name, (shape, dtype) in announced.items()}
    for name in sorted(built.keys() ^ wanted.keys()):
        return f"no rank can build {name} alone" if name in wanted else f"an export has no {name}"
    for name, form in wanted.items():
        if built[name] != form:
            return f"{name} would be {built[name][1]} {built[name][0]}, and an export has {form[1]} {form[0]}"
    return None
