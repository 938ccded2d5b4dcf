"""The groups of Megatron's that verl itself issues collectives on, and Megatron does not."""

from __future__ import annotations

from megatron.core import parallel_state

from rl_safe_workers.adapters.hosting import HostGroups
from rl_safe_workers.topology.groups import Classes, OpClass

DATA_PARALLEL: Classes = (OpClass.REDUCE, OpClass.GATHER_SCATTER)
"""Of the data-parallel group without context parallelism: verl counts tokens and averages the loss over it, and gathers
metrics (transformer_impl.py:842, engine_workers.py:202)."""


WEIGHTS: Classes = (OpClass.GATHER_SCATTER,)
"""Of the expert-parallel and the pipeline group: bridges gather weights over them for each sync with vLLM (mbridge
0.15.1, core/bridge.py:340 and 370)."""


def verl_groups() -> HostGroups:
    """Those groups, with what verl issues on each."""
    return [
        (parallel_state.get_data_parallel_group(), "dp", DATA_PARALLEL),
        (parallel_state.get_expert_model_parallel_group(), "ep", WEIGHTS),
        (parallel_state.get_pipeline_model_parallel_group(), "pp", WEIGHTS),
    ]
