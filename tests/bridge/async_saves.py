"""The rank of the tests of asynchronous saves: NeMo RL's own calls of Megatron-Bridge's own save, four times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NemoRlSettings
from rl_safe_workers.adapters.nemo_rl.policy_process import PolicyProcess
from rl_safe_workers.adapters.patches import replaced
from rl_safe_workers.lifecycle import Phase
from tests.bridge import bridge_saves
from tests.bridge.lora_rank import LoraRank
from tests.bridge.placeholders import placeholders
from tests.distributed.laid_out_rank import Layout, join, layout
from tests.nemo_rl.source import RELEASE, host_code, releases_cache

# isort: split
with placeholders():
    from megatron.bridge.training.checkpointing import maybe_finalize_async_save, save_checkpoint
    from megatron.bridge.training.state import GlobalState

SAVES = 4
ITERATION = "iter_0000000"
FILE = "nemo_rl/models/policy/workers/megatron_policy_worker.py"


def host_worker() -> Any:
    """Returns NeMo RL's worker class, as far as saves go."""
    methods = ["save_checkpoint", "finalize_async_save", *([RELEASE] if releases_cache() else [])]
    names = {
        "torch": torch,
        "gc": gc,
        "save_checkpoint": save_checkpoint,
        "maybe_finalize_async_save": maybe_finalize_async_save,
        "get_async_strategy": get_async_strategy,
    }
    return host_code(FILE, "MegatronPolicyWorkerImpl", methods=methods, names=names)["MegatronPolicyWorkerImpl"]


def worker_of(trainer: LoraRank) -> Any:
    """Returns such a worker over a rank's model. An onload gives every tensor new storage, as after an offload."""
    state = bridge_saves._state(trainer, Path("nowhere"), step=0)
    for name, value in {
        "async_save": True,
        "ckpt_assume_constant_structure": True,
        "use_persistent_ckpt_worker": True,
        "async_strategy": "nvrx",
    }.items():
        setattr(state.cfg.checkpoint, name, value)
    state._async_calls_queue = None
    state.train_state.floating_point_operations_so_far = 0
    worker = host_worker()()
    worker.mcore_state, worker.model, worker.optimizer, worker.scheduler = (
        state,
        trainer.chunks[0],
        trainer.optimizer,
        None,
    )
    worker.checkpointing_context, worker.optimizer_cpu_offload, worker.should_disable_forward_pre_hook = (
        {},
        False,
        False,
    )
    worker.move_model = lambda model, device, **which: model
    worker.move_optimizer = lambda device: None
    worker._async_checkpoint_cuda_cache_active = False
    worker.cfg = {"generation": {"colocated": {"enabled": True}}}
    return worker


def start_queue(state: Any) -> None:
    """As NeMo RL's set-up, by Bridge's own method."""
    GlobalState.initialize_async_checkpoint_worker(state)
    state.async_calls_queue = state._async_calls_queue


def move(trainer: LoraRank, step: int) -> None:
    """Gives every tensor another value, in new storage."""
    for parameter in (p for chunk in trainer.chunks for p in chunk.parameters()):
        parameter.data = parameter.data.clone().add_(0.01 * (step + 1))
    for optimizer in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.clone().add_(0.01 * (step + 1))
        for state in optimizer.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].clone().add_(0.01 * (step + 1))


def saves(rank: int, model: Path, root: Path, kind: str) -> dict[str, Any]:
    """Saves four times; returns for each save which tensors differ from those of its moment, and from the first save.

    Args:
        rank: This rank.
        model: The model's folder.
        root: For the saves.
        kind: ``"stock"`` or ``"ours"``.
    """
    join(rank, 1, root)
    with layout(model, Layout(), kind=partial(LoraRank, adapters="lora")) as trainer:
        trainer.step(0)
        trainer.step(1)
        with _writer(kind) as (start, saving, finishing):
            worker = worker_of(trainer)
            start(worker.mcore_state)
            moments = []
            for step in range(SAVES):
                move(trainer, step)
                with torch.no_grad():
                    moments.append(_moment(trainer, root / f"moment_{step}"))
                folder = root / f"step_{step}"
                with saving():
                    worker.save_checkpoint(str(folder), optimizer_path="yes")
                finishing(worker.finalize_async_save)
            worker.mcore_state.async_calls_queue.close()
        found = [dist_checkpointing.load_plain_tensors(str(root / f"step_{step}" / ITERATION)) for step in range(SAVES)]
    return {
        "tensors": _equal(found[0], found[0]),
        "stale": [_equal(each, found[0]) for each in found[1:]],
        "of their moment": [_equal(each, moment) for each, moment in zip(found, moments, strict=True)],
    }


def _moment(trainer: LoraRank, folder: Path) -> dict[str, torch.Tensor]:
    """Returns what a synchronous save of Bridge's own holds."""
    folder.mkdir()
    state = bridge_saves._state(trainer, folder, step=0)
    save_checkpoint(state, trainer.chunks, trainer.optimizer, None, 0)
    return dist_checkpointing.load_plain_tensors(str(folder / ITERATION))


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> int:
    """How many tensors are equal, bit for bit."""
    assert one.keys() == other.keys()
    return sum(torch.equal(one[key], other[key]) for key in one if isinstance(one[key], torch.Tensor))


Writer = tuple[Callable[[Any], None], Callable[[], Any], Callable[[Callable[[], None]], None]]


@contextmanager
def _writer(kind: str) -> Iterator[Writer]:
    if kind == "stock":
        from tests.bridge.nvrx_on_cpu import pretended_gpu

        with pretended_gpu():
            yield start_queue, nullcontext, lambda finish: finish()
        return
    process = PolicyProcess(NemoRlSettings())
    process._take_world(None)
    for phase in (Phase.GROUPS, Phase.BOOTSTRAP):
        with process.trainer.lifecycle.enter(phase):
            pass
    with ExitStack() as stack:
        for name in ("synchronize", "ipc_collect", "empty_cache"):
            stack.enter_context(replaced(torch.cuda, name, lambda stock: lambda: None))
        stack.enter_context(replaced(GlobalState, "initialize_async_checkpoint_worker", process._starting_queue))
        yield start_queue, lambda: process.saving(optimizer_replicated=False), process.finish_saves
