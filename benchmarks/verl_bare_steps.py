"""Makes one job of verl take steps with and without our phases, in turns.

``VERL_USE_EXTERNAL_MODULES`` loads this module after our plugin. A bare step runs verl's own methods, over the same
groups and the same state. It has no phases, no barriers over the store, no deadlines in the driver, and none of our
metrics.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from inspect import isfunction
from types import MethodType, ModuleType
from typing import Any

from wrapt import when_imported

_GUARDED = ("checkpoint_manager", "agent_loop_manager")
"""Attributes of the trainer that our guards replace."""
_POLL_S = 0.02
"""Seconds between verl's polls for finished prompts. verl's two seconds would hide everything else."""


def is_bare(step: int) -> bool:
    """Returns True for the second and third of each four steps, counted from 1. This order cancels a drift."""
    return step % 4 in (2, 3)


def was_bare(metrics: Mapping[str, float]) -> bool:
    """Returns True for the metrics of a bare step."""
    return "rl_safe/active" not in metrics


@when_imported("verl.workers.engine_workers")  # type: ignore[untyped-decorator]
def _let_workers_change(module: ModuleType) -> None:
    from verl.single_controller.base.decorator import Dispatch, register

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def bench_bare(self: Any, bare: bool) -> None:
        from verl.workers.engine.megatron import MegatronEngineWithLMHead

        take_methods(self, module.ActorRolloutRefWorker, bare=bare)
        take_methods(self.actor.engine, MegatronEngineWithLMHead, bare=bare)

    module.ActorRolloutRefWorker.bench_bare = bench_bare


@when_imported("verl.trainer.ppo.v1.trainer_sync")  # type: ignore[untyped-decorator]
def _let_the_trainer_change(module: ModuleType) -> None:
    """Makes the trainer change between two steps: verl computes a step's metrics after its clock has stopped."""
    stock = module.PPOTrainerSync._compute_metrics

    @functools.wraps(stock)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(self, *args, **kwargs)
        _change(self, module.PPOTrainerSync, bare=is_bare(self.global_steps + 1))
        return found

    module.PPOTrainerSync._compute_metrics = compute


def _change(trainer: Any, stock: type, *, bare: bool) -> None:
    held, buffer = vars(trainer), trainer.replay_buffer
    ours = held.setdefault("bench_ours", {name: held[name] for name in _GUARDED})
    polls = held.setdefault("bench_polls", buffer._wait_for_next_poll)
    held.update({name: guarded._stock if bare else guarded for name, guarded in ours.items()})
    buffer._wait_for_next_poll = polls.__self__._stock if bare else polls
    buffer.poll_interval = _POLL_S
    take_methods(trainer, stock, bare=bare)
    trainer.actor_rollout_wg.bench_bare(bare)


def take_methods(it: Any, stock: type, *, bare: bool) -> None:
    """Gives an object of ours the methods of its verl class, or restores its own methods."""
    ours = itertools.takewhile(lambda cls: cls is not stock, type(it).__mro__)
    for name in {name for cls in ours for name, value in vars(cls).items() if isfunction(value)} & set(dir(stock)):
        if bare:
            vars(it)[name] = MethodType(getattr(stock, name), it)
        else:
            vars(it).pop(name, None)
