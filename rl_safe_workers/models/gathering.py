"""Gathers the shards of every parameter on every rank, one parameter at a time, for an export.

mbridge's own loop has three problems (core/bridge.py:311-414). It announces each parameter with three object
collectives, it asserts that experts are split like the rest of the layer, and it holds all experts of one index in
memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from rl_safe_workers.comms.json_gather import gather_json
from rl_safe_workers.errors import CommunicatorError

EXPERT_WEIGHT = ".mlp.experts.linear_fc"
"""Common part of the names of expert weights. Each name ends with ``weight`` and the expert's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The description of one parameter. Its pipeline stage announces the description to the other stages."""

    stage: int
    chunk: int
    local_name: str
    name: str
    """Name with the layer's global number. The expert's number still counts within this rank."""
    shape: tuple[int, ...]
    """Shape of this rank's shard."""
    dtype: torch.dtype
    tensor_model_parallel: bool
    """True if tensor parallelism splits it. Megatron sets an attribute of this name on a parameter."""
    partition_dim: int
    """The dimension that is split; -1 if there is none. Megatron sets an attribute of this name on a parameter."""

    @property
    def nbytes(self) -> int:
        """The size in bytes of this rank's shard."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as values for JSON."""
        return {**asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Shard:
        """Rebuilds a shard's description from the result of `as_json`.

        Raises:
            CommunicatorError: If the fields are not those of `as_json`.
        """
        dtype = getattr(torch, str(fields.get("dtype")), None)
        if {*fields} != {*cls.__dataclass_fields__} or not isinstance(dtype, torch.dtype):
            raise CommunicatorError(f"a pipeline stage announced a parameter with fields {sorted(fields)}")
        return cls(**{**fields, "shape": tuple(fields["shape"]), "dtype": dtype})


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a model's parameters and its routers' expert biases by name. The biases are buffers."""
    biases = {name: value for name, value in model.state_dict().items() if name.endswith("expert_bias")}
    return {**dict(model.named_parameters()), **biases}


def local_shards(
    tensors: Sequence[dict[str, torch.Tensor]], names: Sequence[Mapping[str, str]], mpu: Any
) -> list[Shard]:
    """Lists the parameters of this rank's chunks."""
    return [
        Shard(
            stage=mpu.pp_rank,
            chunk=chunk,
            local_name=local_name,
            name=names[chunk][local_name],
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            tensor_model_parallel=bool(getattr(tensor, "tensor_model_parallel", False)),
            partition_dim=int(getattr(tensor, "partition_dim", -1)),
        )
        for chunk, of_chunk in enumerate(tensors)
        for local_name, tensor in of_chunk.items()
    ]


def _announce(mine: list[Shard], mpu: Any) -> list[Shard]:
    """Lists the parameters of all pipeline stages. Collective over: the pipeline group."""
    if mpu.pp_size == 1:
        return mine
    stages = gather_json([shard.as_json() for shard in mine], group=mpu.pp_group)
    return [Shard.from_json(fields) for stage in stages for fields in stage]


def export_shards(
    models: Sequence[torch.nn.Module], names: Sequence[Mapping[str, str]], mpu: Any, *, num_experts: int
) -> Iterator[tuple[str, list[torch.Tensor], Shard]]:
    """Yields for every parameter its global name, all its tensor-parallel shards, and its announced description.

    Collective over: the pipeline, expert, expert-tensor and tensor groups of this rank, at each item. Every rank must
    take every item. The generator keeps no reference to the shards while the caller has an item, so a caller that
    clears the list frees their memory.

    Args:
        models: This rank's chunks, with expert weights under their fused names.
        names: For each chunk, the global name of each local name. Expert numbers count within the rank.
        mpu: mbridge's ParallelStates.
        num_experts: Number of experts per layer; 0 for a dense model.
    """
    tensors = [named_tensors(model) for model in models]
    plan = _announce(local_shards(tensors, names, mpu), mpu)
    largest = max((shard.nbytes for shard in plan), default=0)
    for shard in plan:
        is_here = shard.stage == mpu.pp_rank
        # Detached, because torch.no_grad around a generator would keep each item until the next one.
        tensor = tensors[shard.chunk][shard.local_name].detach() if is_here else _room_for(shard)
        if mpu.pp_size > 1:
            dist.broadcast(tensor, src=dist.get_global_rank(mpu.pp_group, shard.stage), group=mpu.pp_group)
        if EXPERT_WEIGHT not in shard.name:
            shards = gather(tensor, mpu.tp_group, mpu.tp_size if shard.tensor_model_parallel else 1)
            del tensor
            yield shard.name, shards, shard
            continue
        prefix, _, index = shard.name.rpartition(".weight")
        at_once = mpu.ep_size * shard.nbytes <= largest
        for ep_rank, expert in enumerate(_experts(tensor, mpu, at_once=at_once)):
            number = int(index) + ep_rank * (num_experts // mpu.ep_size)
            shards = gather(expert, mpu.etp_group, mpu.etp_size)
            del expert
            yield f"{prefix}.weight{number}", shards, shard
        del tensor  # another stage's parameter would stay in memory together with the next one


def _room_for(shard: Shard) -> torch.Tensor:
    """Returns an empty tensor on the device for another stage's parameter."""
    return torch.empty(shard.shape, dtype=shard.dtype, device=torch.cuda.current_device())


def _experts(tensor: torch.Tensor, mpu: Any, *, at_once: bool) -> Iterator[torch.Tensor]:
    """Yields each expert-parallel rank's expert. Uses one gather, or one broadcast per rank, which takes less memory.

    Collective over: the expert group.
    """
    if mpu.ep_size == 1:
        yield tensor
    elif at_once:
        yield from gather(tensor, mpu.ep_group, mpu.ep_size)
    else:
        for ep_rank in range(mpu.ep_size):
            expert = tensor.clone() if ep_rank == mpu.ep_rank else torch.empty_like(tensor)
            dist.broadcast(expert, src=dist.get_global_rank(mpu.ep_group, ep_rank), group=mpu.ep_group)
            yield expert


def gather(tensor: torch.Tensor, group: dist.ProcessGroup | None, size: int) -> list[torch.Tensor]:
    """Returns the shards of ``size`` ranks; only the tensor itself if ``size`` is 1. Collective over: the group."""
    if size == 1:
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(shards, tensor.contiguous(), group=group)
    return shards
