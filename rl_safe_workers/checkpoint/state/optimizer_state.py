"""The distributed optimizer's state as rectangles of global tensors.

Megatron's ``fully_reshardable`` format stores the state of a parameter as a tensor of the parameter's shape, which any
layout can load. But it first gathers the whole state of a data-parallel group on every rank of the group
(distrib_optimizer.py:1030). Here each rank describes the range that it owns as a few rectangles of the same tensors,
under the same keys, and gathers nothing. Megatron can read these checkpoints, and this module those of Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from rl_safe_workers.checkpoint.format.flat_ranges import rectangles, row_major
from rl_safe_workers.checkpoint.format.rectangles import Index
from rl_safe_workers.checkpoint.state.chunk_state import Window
from rl_safe_workers.errors import CheckpointError, CheckpointMismatchError

FULLY_RESHARDABLE = "fully_reshardable"


def parts_of(optimizer: Any) -> list[Any]:
    """Returns the optimizers that Megatron chains (one for dense and one for expert parameters), or the only one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def is_in_place(optimizer: Any) -> bool:
    """Returns True if all optimizer state has the same form in memory as in a checkpoint.

    It returns False for the precision-aware optimizer, which scales the state, and for an optimizer that keeps some
    state on the host. Megatron's own code then describes the state, with a gather.
    """
    return all(
        isinstance(part, DistributedOptimizer)
        and not part.ddp_config.use_megatron_fsdp
        and not part.config.use_precision_aware_optimizer
        and not part.config.optimizer_cpu_offload
        for part in parts_of(optimizer)
    )


def allocate_state(optimizer: Any) -> None:
    """Allocates the state that the first step would allocate, filled with zeros."""
    for part in parts_of(optimizer):
        if getattr(part, "is_stub_optimizer", False) or part.init_state_fn is None:
            continue
        part.init_state_fn(part.optimizer, part.config)
        if is_torch_adam(part):
            for of_parameter in part.optimizer.state.values():
                of_parameter.setdefault("step", torch.tensor(0.0))


def is_torch_adam(part: Any) -> bool:
    """Returns True for torch's own Adam, which counts steps per parameter. Transformer Engine's counts per group."""
    return isinstance(part.optimizer, torch.optim.Adam)


@dataclass(frozen=True, slots=True)
class _Owned:
    """This rank's range of one parameter: where the optimizer keeps it, and its windows by state key."""

    group: int
    order: int
    windows: dict[str, tuple[tuple[str, Window], ...]]


class OptimizerLayout:
    """Where the state of one DistributedOptimizer lies in global tensors. Its state must be allocated.

    Args:
        part: The optimizer.
        model: Windows of every parameter of the model, by ``id`` of the parameter.
    """

    def __init__(self, part: Any, model: dict[int, tuple[Window, ...]]) -> None:
        self.part = part
        self._owned = tuple(
            self._own(parameter, index, model) for index, parameter in enumerate(_owned_parameters(part))
        )

    def _own(self, parameter: torch.nn.Parameter, index: int, model: dict[int, tuple[Window, ...]]) -> _Owned:
        group, order = self.part.model_param_group_index_map[parameter]
        flats = self._flats(group, order)
        owned = self.part._get_model_param_range_map(parameter)["param"]
        if id(parameter) not in model:
            raise CheckpointError(
                f"a trained parameter of shape {tuple(parameter.shape)} is not in the model's sharded_state_dict: "
                "let its module describe it there"
            )
        slices = [s for window in model[id(parameter)] for s in _slice(window, owned.start, owned.end)]
        replica = _replica_id(slices[0].place, self.part) if slices else None
        windows = {
            key: tuple((f"{key}.{index}.{i}", _of_state(s, key, flat.dtype, replica)) for i, s in enumerate(slices))
            for key, flat in flats.items()
        }
        return _Owned(group, order, windows)

    def _flats(self, group: int, order: int) -> dict[str, torch.Tensor]:
        """Returns the fp32 parameters and each state tensor of a range, all one-dimensional."""
        main = self.part.optimizer.param_groups[group]["params"][order]
        state = self.part.optimizer.state[main]
        # The parameter groups have the step counts.
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and k != "step"}
        return {"param": main.detach(), **tensors}

    def shards(self) -> dict[str, ShardedTensor]:
        """Returns every rectangle as a view of the state in memory. Not collective; no copy."""
        found = {}
        for owned in self._owned:
            flats = self._flats(owned.group, owned.order)
            for key, windows in owned.windows.items():
                flat = flats[key]
                for name, window in windows:
                    found[name] = window.of(flat)
        return found


def _owned_parameters(part: Any) -> Iterator[torch.nn.Parameter]:
    """Yields the parameters of which this rank owns a range. A stub, made if all parameters are frozen, has none."""
    return iter(getattr(part, "model_param_gbuf_map", {}))


def _slice(window: Window, start: int, stop: int) -> Iterator[Window]:
    """Yields the rectangles of a window in a range of the flat parameter. Their starts count from the range's start."""
    place, size = window.place, prod(window.shape)
    if not window.is_contiguous:
        raise CheckpointError(
            f"{place.key}: its sharded form is a strided view of the parameter, shape {window.shape}, strides "
            f"{window.strides}, so a data-parallel rank's range is not a rectangle: keep each expert in its own tensor"
        )
    first, last = max(start - window.start, 0), min(stop - window.start, size)
    for r in rectangles(first, last, window.shape):
        offset = tuple(a + b for a, b in zip(place.global_offset, r.offset, strict=True))
        at = replace(place, local_shape=r.shape, global_offset=offset)
        yield Window(window.start + r.start - start, r.shape, row_major(r.shape), at)


def _of_state(window: Window, key: str, dtype: torch.dtype, replica: Index | None) -> Window:
    place = replace(window.place, key=f"optimizer.state.{key}.{window.place.key}", dtype=dtype, replica_id=replica)
    return replace(window, place=place)


def _replica_id(parameter: ShardedTensor, part: Any) -> Index:
    """Returns the replica id of this rank's optimizer shard. Only the copy whose replica id is all zeros is written.

    The replica id of a parameter is (pipeline, tensor, data). The last is this rank's position among the ranks that
    hold the parameter. These ranks share one copy of its optimizer state, or form one group for each copy.
    """
    pipeline, tensor, data = parameter.replica_id
    mine, rank = dist.get_process_group_ranks(part.data_parallel_group), dist.get_rank()
    for holders in _ranks_with_equal_parameters():
        if set(mine) <= set(holders) and holders.index(rank) == data:
            return pipeline, tensor, min(holders.index(other) for other in mine)
    raise CheckpointError(
        f"{parameter.key}: the replica id of rank {rank} has data rank {data}, which is neither its data-parallel nor "
        f"its expert-data-parallel rank. Ranks {mine} share its optimizer state: use Megatron's own groups for the "
        "layer"
    )


def _ranks_with_equal_parameters() -> list[list[int]]:
    groups = (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_group(),
    )
    return [dist.get_process_group_ranks(group) for group in groups]


def common_state(part: Any) -> dict[str, Any]:
    """Returns one DistributedOptimizer's state without its tensors, as Megatron's own state dict has it."""
    step = _step_of(part)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in _groups(part)]
    state: dict[str, Any] = {
        "optimizer": {"param_groups": groups if step is None else [{**group, "step": step} for group in groups]},
        "param_state_sharding_type": FULLY_RESHARDABLE,
    }
    if scaler := getattr(part, "grad_scaler", None):
        state["grad_scaler"] = scaler.state_dict()
    return state


def _groups(part: Any) -> list[dict[str, Any]]:
    return [] if part.optimizer is None else part.optimizer.param_groups


def _step_of(part: Any) -> float | int | None:
    """Returns the number of steps, which torch's Adam counts for each parameter; None if this rank has no count."""
    if is_torch_adam(part):
        return next((float(state["step"]) for state in part.optimizer.state.values()), None)
    return next((int(group["step"]) for group in _groups(part) if "step" in group), None)


def restore_common(optimizer: Any, saved: dict[Any, Any]) -> None:
    """Restores parameter groups, step counts and gradient scaler. Not collective.

    The run that saved may have chained another number of optimizers: without expert parallelism Megatron makes one.

    Raises:
        CheckpointMismatchError: If the checkpoint lacks a parameter group that this run has.
    """
    parts = saved_parts(saved)
    groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
    scalers = [part["grad_scaler"] for part in parts if "grad_scaler" in part]
    for part in parts_of(optimizer):
        for group in _groups(part):
            loaded = _match(group, groups)
            group.update({k: v for k, v in loaded.items() if k not in {"params", *param_group_identifier_keys}})
        if is_torch_adam(part):
            set_adam_steps(part, float(groups[0].get("step", 0)))
        else:
            _count_in_integers(part)
        if scalers and getattr(part, "grad_scaler", None):
            part.grad_scaler.load_state_dict(scalers[0])


def _count_in_integers(part: Any) -> None:
    """Converts step counts to integers for Transformer Engine's Adam: torch's Adam counts in floats."""
    for group in _groups(part):
        if "step" in group:
            group["step"] = int(group["step"])


def saved_parts(saved: dict[Any, Any]) -> list[dict[str, Any]]:
    """Returns the state of each optimizer in a checkpoint: of those that the run had chained, or of the only one."""
    if "optimizer" in saved:
        return [saved]
    # A load under another number of optimizers may have added parts that were not saved. They lack "optimizer".
    parts = {index: part for index, part in saved.items() if isinstance(index, int) and "optimizer" in part}
    return [parts[index] for index in sorted(parts)]


def _identity(group: dict[str, Any]) -> dict[str, Any]:
    # NeMo writes some of the keys with a prefix (distrib_optimizer.py:740).
    return {key: group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys}


def _match(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the saved group most like one of this run: equal multipliers, then as many equal settings as possible."""
    mine = _identity(group)

    def likeness(other: dict[str, Any]) -> int:
        theirs = _identity(other)
        if any(mine.get(key) != theirs.get(key) for key in ("wd_mult", "lr_mult", "is_decoupled_lr")):
            return -1
        return sum(mine[key] == theirs[key] for key in mine)

    best = max(saved, key=likeness, default=group)
    if not saved or likeness(best) < 0:
        raise CheckpointMismatchError(
            f"the checkpoint has no optimizer parameter group like {mine}, only "
            f"{[_identity(other) for other in saved]}: resume with the optimizer settings that it was saved with"
        )
    return best


def set_adam_steps(part: Any, step: float) -> None:
    """Gives each parameter of torch's Adam its own step count, as in a run that has loaded nothing."""
    for of_parameter in part.optimizer.state.values():
        of_parameter["step"] = torch.tensor(step)
    for group in part.optimizer.param_groups:
        group.pop("step", None)
