"""Collectives that NeMo RL itself issues on Megatron's groups, and Megatron does not.

| group | collective | where |
|---|---|---|
| data-parallel without context parallelism | `all_reduce` of token counts and metrics | megatron_policy_worker.py:788, 1571; models/megatron/train.py:856 |
| pipeline | `all_gather_object` of who has an object | models/megatron/pipeline_parallel.py:55 |
"""  # noqa: E501

from __future__ import annotations

from megatron.core import parallel_state

from rl_safe_workers.comms.bootstrap import HostGroups
from rl_safe_workers.topology.groups import OpClass


def nemo_rl_groups() -> HostGroups:
    """Those groups, with what NeMo RL issues on each."""
    return [
        (parallel_state.get_data_parallel_group(), "dp", (OpClass.REDUCE,)),
        (parallel_state.get_pipeline_model_parallel_group(), "pp", (OpClass.GATHER_SCATTER,)),
    ]
