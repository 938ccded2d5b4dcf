"""Megatron-Bridge's own save and load of a checkpoint, which NeMo RL calls: with adapters, of them alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import yaml
from megatron.core import num_microbatches_calculator, parallel_state

from tests.bridge.lora_rank import LoraRank
from tests.bridge.placeholders import placeholders

with placeholders():
    from megatron.bridge.training.checkpointing import load_checkpoint, save_checkpoint
    from megatron.bridge.training.config import CheckpointConfig
    from megatron.bridge.training.state import FaultToleranceState, TrainState


def _state(trainer: LoraRank, root: Path, *, step: int) -> Any:
    """Returns the part of Bridge's global state that these functions read, with the settings that NeMo RL gives."""
    model = trainer.bridge.config
    sizes = {name: getattr(model, name) for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")}
    checkpoint = CheckpointConfig(
        save=str(root), load=str(root), fully_parallel_save=False, fully_parallel_load=False, load_optim=False
    )

    def to_yaml(path: str) -> None:
        of_checkpoint = {"save_optim": True, "save_rng": True, "fully_parallel_save": False}
        Path(path).write_text(yaml.safe_dump({"model": sizes, "checkpoint": of_checkpoint}))

    config = SimpleNamespace(
        checkpoint=checkpoint,
        peft=trainer.peft,
        model=model,
        ddp=SimpleNamespace(use_megatron_fsdp=False),
        optimizer=SimpleNamespace(use_distributed_optimizer=True),
        rng=SimpleNamespace(data_parallel_random_init=False),
        dataset=None,
        dist=None,
        ft=None,
        logger=SimpleNamespace(log_progress=False, mlflow_log_artifacts=False),
        to_yaml=to_yaml,
    )
    return SimpleNamespace(
        cfg=config,
        train_state=TrainState(step=step),
        wandb_logger=None,
        comet_logger=None,
        mlflow_logger=None,
        fault_tolerance_state=FaultToleranceState(),
    )


ITERATION = "iter_0000002"


def save_with_bridge(trainer: LoraRank, root: Path) -> None:
    """Saves as NeMo RL has it saved. Collective."""
    if dist.get_rank() == 0:
        root.mkdir()
    dist.barrier()
    save_checkpoint(_state(trainer, root, step=2), trainer.chunks, trainer.optimizer, None, 0)


def load_with_bridge(trainer: LoraRank, root: Path) -> int:
    """Loads as NeMo RL has it loaded, into a model with its base, but for the optimizer; returns the step. Collective.

    Megatron's own load of the optimizer mixes up the step counts of torch's Adam (distrib_optimizer.py:825).
    """
    # NeMo RL has made it at its set-up; one micro-batch of one row on each data-parallel rank.
    size = parallel_state.get_data_parallel_world_size()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(dist.get_rank(), None, size, 1, size)
    state = _state(trainer, root, step=0)
    load_checkpoint(state, trainer.chunks, trainer.optimizer, None)
    return int(state.train_state.step)
