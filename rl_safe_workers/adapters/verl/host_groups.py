"""Lists Megatron's groups on which verl issues collectives that Megatron does not issue there."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state

from rl_safe_workers.comms.bootstrap import HostGroups
from rl_safe_workers.topology.groups import Classes, OpClass

DATA_PARALLEL: Classes = (OpClass.REDUCE, OpClass.GATHER_SCATTER)
"""Op classes on the data-parallel group without context parallelism. verl counts tokens, averages the loss and gathers
metrics over this group (transformer_impl.py:842, engine_workers.py:202)."""


WEIGHTS: Classes = (OpClass.GATHER_SCATTER,)
"""Op classes on the expert-parallel and the pipeline group. Bridges gather weights over them for each sync with vLLM
(mbridge 0.15.1, core/bridge.py:340 and 370)."""


DELTA: Classes = (OpClass.GATHER_SCATTER, OpClass.ROOT_EXCHANGE)
"""Op classes for verl's delta checkpoint engine. It all-gathers counts and gathers changes (delta_export.py:277-284,
sparse_gather.py:85 and 136). With one pipeline stage it uses the tensor-parallel and the joint expert group. With
several stages it uses the default group (delta_export.py:270)."""
DELTA_KEYS = ("tp", "tp_ep_mp")


def verl_groups(*, delta_weights: bool) -> HostGroups:
    """Returns the groups that verl uses, each with its key and with the op classes that verl issues on it.

    Args:
        delta_weights: Whether weight syncs send only changes of weights.
    """
    groups = [
        (parallel_state.get_data_parallel_group(), "dp", DATA_PARALLEL),
        (parallel_state.get_expert_model_parallel_group(), "ep", WEIGHTS),
        (parallel_state.get_pipeline_model_parallel_group(), "pp", WEIGHTS),
    ]
    if delta_weights and parallel_state.get_pipeline_model_parallel_world_size() > 1:
        groups.append((dist.group.WORLD, "world", DELTA))
    elif delta_weights:
        gathered = (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_tensor_and_model_parallel_group(),
        )
        groups += [(group, key, DELTA) for group, key in zip(gathered, DELTA_KEYS, strict=True)]
    return groups
