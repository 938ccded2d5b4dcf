"""Shims for megatron-core's load, which verl's own checkpoint manager uses, where there is no GPU.

Where neither Transformer Engine nor APEX is installed, megatron-core takes torch's Adam, which counts steps for each
parameter. Its loads are not ready for that (megatron-core 0.16.1).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def apply() -> None:
    """Has loads work on the CPU, also into an optimizer that has taken no step."""
    make_buffers_on_cpu()
    _begin_with_a_step()
    _leave_steps()
    _count_steps_apart()


def make_buffers_on_cpu() -> None:
    """Has a fully-parallel load make its buffers there (dist_checkpointing/exchange_utils.py:98 and 110)."""
    init_data, empty_like = ShardedTensor.init_data, torch.empty_like

    @functools.wraps(init_data)
    def on_cpu(self: ShardedTensor, device: Any, *_: Any) -> None:
        init_data(self, "cpu", torch.empty)

    @functools.wraps(empty_like)
    def like(*args: Any, **kwargs: Any) -> torch.Tensor:
        return empty_like(
            *args, **{**kwargs, "device": "cpu" if kwargs.get("device") == "cuda" else kwargs.get("device")}
        )

    ShardedTensor.init_data, torch.empty_like = on_cpu, like


def _begin_with_a_step() -> None:
    """Gives an optimizer its state before a load, which asks for its number of steps (distrib_optimizer.py:642)."""
    stock = DistributedOptimizer.sharded_state_dict

    @functools.wraps(stock)
    def describe(self: Any, model: Any = {}, is_loading: bool = False, **kwargs: Any) -> Any:  # noqa: B006
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return stock(self, model, is_loading, **kwargs)

    DistributedOptimizer.sharded_state_dict = describe


def _leave_steps() -> None:
    """Has the load of ``fully_reshardable`` not ask for steps (distrib_optimizer.py:940): they are in the groups."""
    stock = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(stock)
    def put(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        stock(self, model_param, {"step": state["step"], **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = put


def _count_steps_apart() -> None:
    """Gives each parameter a count of steps of its own: a load gives all the same tensor (distrib_optimizer.py:825)."""
    stock = DistributedOptimizer.load_state_dict

    @functools.wraps(stock)
    def load(self: Any, state_dict: Any) -> None:
        stock(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    DistributedOptimizer.load_state_dict = load
