"""Puts an engine for CPUs where ms-swift calls vLLM, and a reward: a plugin for --external_plugins, before ours."""

from __future__ import annotations

import os
import sys
from typing import Any

from swift.rewards import ORM, orms

from tests.swift import engine_double, real_engine


class Sum(ORM):
    """Rewards small tokens."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0 - sum(map(int, text.split())) / (96.0 * engine_double.TOKENS) for text in completions]


orms["sum"] = Sum

if "swift.ray.megatron" in sys.modules:
    import ray
    from swift.ray.megatron.rollout import adapter, vllm_server

    # The actors of the engine are made of this name; weights go to them over shared memory, as on an NPU.
    if real_engine.FAULTS not in os.environ:  # else another plugin puts a real one there, over ours
        vllm_server.VllmServer = engine_double.RayServer
    adapter._is_ipc_supported = lambda: False
    init = ray.init

    def init_here(*args: Any, **kwargs: Any) -> Any:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"  # Ray believes it; torch here knows of no GPU
        return init(*args, num_gpus=2, num_cpus=8, include_dashboard=False, **kwargs)

    ray.init = init_here
else:
    from accelerate.state import DistributedType, PartialState
    from accelerate.utils import operations
    from swift.megatron.trainers import rollout_mixin
    from swift.rlhf_trainers import utils, vllm_client

    def state_on_cpu() -> Any:
        if PartialState._shared_state.get("distributed_type") is not DistributedType.MULTI_CPU:
            PartialState._reset_state()
        return PartialState(cpu=True)

    # accelerate, by which ms-swift gathers over all ranks, takes ranks without GPUs for single processes.
    operations.PartialState = state_on_cpu
    # A CPU has no cache of memory to empty.
    utils.aggressive_empty_cache = rollout_mixin.aggressive_empty_cache = lambda: None
    rollout_mixin.is_vllm_available = lambda: True
    mixin = rollout_mixin.MegatronRolloutMixin
    if real_engine.FAULTS in os.environ:
        mixin._prepare_vllm_engine = real_engine.preparing(mixin._prepare_vllm_engine)
    else:
        mixin._prepare_vllm_engine = lambda self: engine_double.ColocatedEngine()

    class NoGroup:
        """Stands in for vLLM's group of a trainer and a server, over which weights go: none go."""

        group: Any = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.group = self

        @classmethod
        def create(cls, *args: Any, **kwargs: Any) -> Any:
            return cls()

        def barrier(self) -> None: ...

    vllm_client.is_vllm_available = lambda: True
    vllm_client.StatelessProcessGroup = vllm_client.PyNcclCommunicator = NoGroup
    vllm_client._broadcast_tensors_for_vllm_weight_sync = lambda communicator, tensors: None
