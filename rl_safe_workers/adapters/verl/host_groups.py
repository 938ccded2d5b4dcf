"""The groups of Megatron's that verl itself issues collectives on, and Megatron does not."""

from __future__ import annotations

from megatron.core import parallel_state

from rl_safe_workers.comms.bootstrap import HostGroups
from rl_safe_workers.topology.groups import Classes, OpClass

DATA_PARALLEL: Classes = (OpClass.REDUCE, OpClass.GATHER_SCATTER)
"""The data-parallel group without context parallelism: verl counts tokens and averages the loss over it, and gathers
metrics (transformer_impl.py:842, engine_workers.py:202)."""


WEIGHTS: Classes = (OpClass.GATHER_SCATTER,)
"""The expert-parallel and the pipeline group: bridges gather weights over them for each sync with vLLM (mbridge
0.15.1, core/bridge.py:340 and 370)."""


DELTA: Classes = (OpClass.GATHER_SCATTER, OpClass.ALL_TO_ALL)
"""The tensor-parallel and the joint expert group, with verl's delta checkpoint engine and one pipeline stage: counts
are all-gathered, changes gathered, which NCCL makes of sends (delta_export.py:277-284, sparse_gather.py:85 and 136)."""
DELTA_KEYS = ("tp", "tp_ep_mp")


def verl_groups(*, delta_weights: bool) -> HostGroups:
    """Returns those groups, with the op classes that verl issues on each.

    Args:
        delta_weights: Whether the rollout is sent changes of weights.
    """
    groups = [
        (parallel_state.get_data_parallel_group(), "dp", DATA_PARALLEL),
        (parallel_state.get_expert_model_parallel_group(), "ep", WEIGHTS),
        (parallel_state.get_pipeline_model_parallel_group(), "pp", WEIGHTS),
    ]
    # With several stages changes are gathered over the default group.
    if delta_weights and parallel_state.get_pipeline_model_parallel_world_size() == 1:
        gathered = (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_tensor_and_model_parallel_group(),
        )
        groups += [(group, key, DELTA) for group, key in zip(gathered, DELTA_KEYS, strict=True)]
    return groups
