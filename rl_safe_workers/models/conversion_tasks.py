"""Lists the HF weights that a tensor-parallel group can build out of Megatron-Bridge's conversion tasks.

Megatron-Bridge's export brings every weight to every rank: over the pipeline, the expert and the tensor groups. Here,
a task runs only on the ranks that have its parameter, and gathers only over their tensor group.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rl_safe_workers.comms.json_gather import gather_json
from rl_safe_workers.errors import WeightSyncError
from rl_safe_workers.models.own_weights import (
    Announced,
    OwnWeight,
    difference_from_export,
    is_first_replica,
    own_weight,
)

_EXPERT_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+|\d+$")


class _Alone:
    """Stands for a process group of this rank alone. The library then runs no collective, and calls only these two."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


_SET_GROUPS = "set_process_groups_from_pg_collection"
_NO_GATHER = SimpleNamespace(pp=_Alone(), ep=_Alone())
"""Groups for `set_process_groups_from_pg_collection`. The library keeps its own groups for the missing kinds."""


def own_weights_of_tasks(
    auto_bridge: Any, models: Sequence[torch.nn.Module], tasks: Iterable[Any], announced: Announced
) -> list[OwnWeight] | str:
    """Lists the weights that this rank helps to build. Leaves out a parameter if another rank has its first replica.

    Collective over: the training world. It also runs collectives in the tensor and expert-tensor groups.

    Args:
        auto_bridge: Megatron-Bridge's AutoBridge.
        models: This rank's chunks.
        tasks: The tasks of `AutoBridge.get_conversion_tasks` for these chunks.
        announced: The weights of an export of the same model. All ranks together must build exactly these.

    Returns:
        The weights; or, on every rank, the reason why the export is needed. For example, some models have one HF weight
        for all experts, but the experts are on several ranks.

    Raises:
        WeightSyncError: On every rank, if the conversion of a tensor-parallel parameter has failed on one rank.
    """
    own, kinds, tasks = list[OwnWeight](), dict[tuple[int, str], int](), list(tasks)
    problems = gather_json(_problem(auto_bridge, tasks), group=dist.group.WORLD)  # type: ignore[arg-type]
    if found := next(filter(None, problems), None):
        return str(found)
    failure = None
    for position, task in enumerate(tasks):
        if task.param_weight is None:
            continue  # another pipeline stage has it
        mapping = task.mapping
        kind = task.vp_stage, _EXPERT_NUMBER.sub("", task.param_name)
        place = (mapping.pp_rank, task.vp_stage, kinds.setdefault(kind, position))
        if is_first_replica(is_expert=mapping.is_expert):
            try:
                own.append(_of_task(auto_bridge, list(models), task, place))
            except Exception as error:  # the other ranks come to the gather below
                text = f"{task.global_param_name} cannot be converted alone: {type(error).__name__}: {error}"
                failure = text, mapping.tp_size > 1
                break
    failures = gather_json(failure, group=dist.group.WORLD)  # type: ignore[arg-type]
    for text, is_split in filter(None, failures):
        if is_split:
            # The tensor-parallel peers may have gathered without this rank, so their group is out of step.
            raise WeightSyncError(text)
        return str(text)
    obstacle = difference_from_export(own, announced)
    return own if obstacle is None else obstacle


def _problem(auto_bridge: Any, tasks: Sequence[Any]) -> str | None:
    """Returns the reason why the tasks of this rank cannot be run alone; None if there is no such reason."""
    if "merge_adapter_weights" not in inspect.signature(auto_bridge.export_hf_weights).parameters:
        return "this Megatron-Bridge cannot leave LoRA adapters alone"
    for task in tasks:
        if ".to_wrap." in task.global_param_name:
            return "an export merges LoRA adapters into the weights"
        if isinstance(task.param_weight, DTensor):
            return f"{task.global_param_name} is a DTensor"
        if not hasattr(type(task.mapping), _SET_GROUPS):
            return f"the mapping of {task.global_param_name} cannot do without other ranks"
    return None


def _of_task(auto_bridge: Any, models: list[torch.nn.Module], task: Any, place: tuple[int, ...]) -> OwnWeight:
    mapping = task.mapping
    alone = replace(task, mapping=_without_gathers(mapping))

    def convert() -> tuple[list[str], list[torch.Tensor]]:
        exported = auto_bridge.export_hf_weights(
            models, cpu=False, show_progress=False, conversion_tasks=[alone], merge_adapter_weights=False
        )
        pairs = list(exported)
        return [name for name, _ in pairs], [weight for _, weight in pairs]

    return own_weight(
        place,
        task.param_weight,
        convert,
        is_split=mapping.tp_size > 1,
        is_source=mapping.tp_rank == 0,
    )


def _without_gathers(mapping: Any) -> Any:
    """Returns a copy of a mapping that neither broadcasts to other pipeline stages nor gathers experts."""
    alone = copy.copy(mapping)
    for name, value in vars(mapping).items():
        if isinstance(value, dict):
            setattr(alone, name, dict(value))  # caches
        elif hasattr(type(value), _SET_GROUPS):
            setattr(alone, name, _without_gathers(value))
    alone.set_process_groups_from_pg_collection(_NO_GATHER)
    return alone
