"""verl's own training worker as these tests drive it: on gloo, with the tiny MoE."""

from __future__ import annotations

import hashlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

SEQUENCES, LENGTH, VOCABULARY = 8, 12, 100


def training_worker(model: Path, *, model_type: str = "language_model", **settings: Any) -> Any:
    """One of verl's TrainingWorkers with a Megatron engine, initialised. Collective over: the ranks.

    Args:
        model: A HF directory.
        model_type: verl's: ``language_model`` or ``value_model``.
        **settings: Of verl's engine; ``checkpoint`` is verl's checkpoint node, ``shards`` saves weights in shards, and
            ``ours`` takes our worker, which makes the default group itself.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.utils.distributed import initialize_global_process_group_ray
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    from rl_safe_workers.adapters.verl import cpu_platform, local_layers

    cpu_platform.apply()
    local_layers.apply()
    cls: Any = TrainingWorker
    if settings.pop("ours", False):
        from rl_safe_workers.adapters.verl.workers import SafeTrainingWorker as cls  # noqa: N813
    else:
        initialize_global_process_group_ray(60, backend="gloo")
    checkpoint = CheckpointConfig(**settings.pop("checkpoint", {}))
    shards = settings.pop("shards", False)
    engine = {"expert_model_parallel_size": 2, **settings}
    worker = cls(
        TrainingWorkerConfig(
            model_type=model_type,
            model_config=HFModelConfig(path=str(model), use_remove_padding=False),
            engine_config=McoreEngineConfig(
                vanilla_mbridge=True,
                use_dynamic_bsz=False,
                micro_batch_size_per_gpu=2,
                infer_micro_batch_size_per_gpu=2,
                **engine,
            ),
            optimizer_config=McoreOptimizerConfig(lr=1e-3, lr_decay_steps=10, total_training_steps=10),
            checkpoint_config=checkpoint,
        )
    )
    worker.reset()
    # verl's use_dist_checkpointing would ask for the first weights in shards, too.
    worker.engine.checkpoint_mananager.use_dist_checkpointing = shards
    worker.set_loss_fn(partial(loss, None))
    return worker


def syncing_worker(trained: Any, rollout: Any) -> Any:
    """Our worker that sends weights, as far as a sync needs it.

    Args:
        trained: Result of `training_worker`.
        rollout: Stands for verl's adapter of the rollout engines.
    """
    from omegaconf import OmegaConf

    from rl_safe_workers.adapters.verl.workers import SafeActorRolloutRefWorker

    worker: Any = SafeActorRolloutRefWorker.__new__(SafeActorRolloutRefWorker)
    worker.actor, worker.rollout, worker.checkpoint_engine = trained, rollout, None
    worker.layered_summon, worker.peft_merge, worker.base_sync_done = False, False, True
    settings = {"name": "vllm", "free_cache_engine": True, "checkpoint_engine": {"backend": "naive"}}
    worker.config = OmegaConf.create({"rollout": settings})
    return worker


def loss(config: Any = None, model_output: Any = None, data: Any = None, dp_group: Any = None) -> Any:
    """Mean negative log-likelihood of every token."""
    from verl.workers.utils.losses import sft_loss

    value, _ = sft_loss(config, model_output, data, dp_group)
    return value, {"sft/loss": value.detach().item()}


def batch(seed: int) -> TensorDict:
    """This rank's sequences of a batch, in the form that verl's engines take."""
    from verl.utils import tensordict_utils as tu

    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    rows = [torch.randint(VOCABULARY, (LENGTH - i % 3,), generator=generator) for i in range(SEQUENCES)]
    nested = partial(torch.nested.nested_tensor, layout=torch.jagged)
    tensors = {
        "input_ids": nested(rows),
        "position_ids": nested([torch.arange(len(row)) for row in rows]),
        "loss_mask": nested([torch.ones_like(row) for row in rows]),
    }
    return tu.get_tensordict(
        tensor_dict=tensors,
        non_tensor_dict={
            "temperature": 1.0,
            "update_lr_scheduler": True,
            "global_token_num": [len(row) for row in rows],
        },
    )


def train(worker: Any, seed: int) -> tuple[float, float]:
    """One update; returns the mean loss over all data-parallel ranks and the gradient norm, as verl reports them."""
    from verl.utils import tensordict_utils as tu

    metrics = tu.get(worker.train_batch(batch(seed)), "metrics")
    return float(metrics["loss"]), float(metrics["grad_norm"])


def state_of(worker: Any) -> dict[str, str]:
    """Digests of this rank's parameters, optimizer state, parameter groups and random states; every bit counts."""
    import random

    import numpy as np
    from megatron.core import tensor_parallel

    from rl_safe_workers.checkpoint.state.optimizer_state import parts_of

    engine = worker.engine
    parts = parts_of(engine.optimizer)
    found = {name: _digest(tensor) for chunk in engine.module for name, tensor in chunk.module.named_parameters()}
    for number, part in enumerate(parts):
        for group in part.optimizer.param_groups:
            # The scheduler sets the others anew at each step.
            settings = {key: group[key] for key in ("betas", "eps", "lr_mult", "wd_mult")}
            found[f"optimizer {number} settings {group.get('is_expert_parallel')}"] = repr(settings)
        for index, (main, state) in enumerate(part.optimizer.state.items()):
            found[f"optimizer {number} {index} param"] = _digest(main)
            found |= {f"optimizer {number} {index} {key}": _digest(torch.as_tensor(v)) for key, v in state.items()}
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    # verl keeps one random state for each pipeline and tensor rank (megatron_checkpoint_manager.py:330): that of
    # data-parallel rank 0, whose expert-parallel stream is not every rank's.
    found |= {f"rng {name}": _digest(s) for name, s in sorted(tracker.items()) if "expert" not in name}
    found["rng torch"], found["rng numpy"] = _digest(torch.get_rng_state()), repr(np.random.get_state()[1].tolist())
    found["rng random"] = repr(random.getstate())
    return found


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def differences(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Returns the entries of `state_of` that differ between two states."""
    names = before.keys() | after.keys()
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def show(*figures: object) -> None:
    """Writes figures where ``pytest -s`` shows them."""
    sys.stdout.write("\n".join(("", *map(str, figures), "")))
