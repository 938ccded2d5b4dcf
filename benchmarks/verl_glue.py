"""Meters calls in a job of verl. ``VERL_USE_EXTERNAL_MODULES`` loads this module in stock runs and in ours.

It also makes jobs comparable, with the same order of batches in every job. And it lets many jobs run on one machine,
with a range of ports for each job.
"""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from wrapt import when_imported

from benchmarks.host_meter import FOLDER, take_turns, watch
from rl_safe_workers.adapters.verl import weight_sockets

CALLS = (
    "init_model",
    "compute_log_prob",
    "update_actor",
    "update_weights",
    "save_checkpoint",
    "load_checkpoint",
)
"""Methods of verl's actor worker that are metered."""
PORTS = "RL_SAFE_BENCH_PORTS"
"""Environment variable: the first port of this job. verl and vLLM choose a port long before they listen on it."""
PORTS_OF_JOB = 100
_PORTS_OF_OWNER = 10
SAME_BATCHES = "RL_SAFE_BENCH_SAME_BATCHES"
"""Environment variable: set if the samples of a batch must have the same order in every job."""
STOCK_ON_CPU = "RL_SAFE_BENCH_STOCK_ON_CPU"
"""Environment variable: set in stock jobs without a GPU, which need the tests' shims."""


@when_imported("verl.workers.engine_workers")  # type: ignore[untyped-decorator]
def _watch_workers(module: ModuleType) -> None:
    for name in CALLS:
        watch(module.ActorRolloutRefWorker, name, name)
    if os.environ.get(STOCK_ON_CPU):
        from rl_safe_workers.adapters.verl import cpu_platform, local_layers
        from tests.verl import stock_on_cpu

        cpu_platform.apply()
        local_layers.apply()
        stock_on_cpu.apply()
        # verl asks for gloo twice: for the host, and for the device, which is the host here.
        module.initialize_global_process_group_ray = functools.partial(
            module.initialize_global_process_group_ray, backend="gloo"
        )


@when_imported("verl.trainer.ppo.v1.trainer_sync")  # type: ignore[untyped-decorator]
def _alternate_steps(module: ModuleType) -> None:
    take_turns(module.PPOTrainerSync, "on_step_begin", "on_step_end", left_out=1)


@when_imported("verl.trainer.ppo.v1.trainer_base")  # type: ignore[untyped-decorator]
def _order_batches(module: ModuleType) -> None:
    """Names prompts by number, and sorts samples by name. verl uses random names, and the order of completion."""
    if not os.environ.get(SAME_BATCHES):
        return
    number = itertools.count()
    module.uuid = SimpleNamespace(uuid4=lambda: f"{next(number):08d}")
    balance = module.PPOTrainer._balance_batch

    @functools.wraps(balance)
    def sorted_first(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch.reorder(sorted(range(len(batch.keys)), key=batch.keys.__getitem__))
        return balance(self, batch, *args, **kwargs)

    module.PPOTrainer._balance_batch = sorted_first


@when_imported("verl.utils.tokenizer.continuous_token_wiring")  # type: ignore[untyped-decorator]
def _take_any_tokenizer(module: ModuleType) -> None:
    """Lets a Qwen2 use the tokenizer of our seeded models. verl expects a newline token in that family's tokenizer."""
    module._MODEL_TYPE_TO_FAMILY.pop("qwen2")


@when_imported("verl.single_controller.ray.base")  # type: ignore[untyped-decorator]
def _take_own_port(module: ModuleType) -> None:
    if PORTS not in os.environ:
        return
    first = int(os.environ[PORTS])
    stock = module.RayWorkerGroup.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("master_port_range", [first, first + _PORTS_OF_OWNER])
        stock(self, *args, **kwargs)

    module.RayWorkerGroup.__init__ = init


# Without this, stock jobs on one machine would share sockets. Our jobs already have their own.
when_imported(weight_sockets.MODULE)(weight_sockets.move)


@when_imported("verl.workers.rollout.vllm_rollout.vllm_async_server")  # type: ignore[untyped-decorator]
def _take_own_vllm_port(_: ModuleType) -> None:
    """Sets a variable with a port of this job. vLLM's engine inherits it, and takes the first free port from there."""
    if PORTS not in os.environ:
        return
    first = int(os.environ[PORTS])
    for port in range(first + _PORTS_OF_OWNER, first + PORTS_OF_JOB, _PORTS_OF_OWNER):
        try:
            (Path(os.environ[FOLDER]) / f"port{port}").touch(exist_ok=False)
        except FileExistsError:
            continue
        os.environ["VLLM_PORT"] = str(port)
        return
