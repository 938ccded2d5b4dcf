"""Megatron-core's own save with its flags turned on again: collective over the default group."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from rl_safe_workers.checkpoint.state.megatron import FORMAT
from rl_safe_workers.config import CheckpointConfig


def _keep_results_in_process() -> None:
    """Prevents the helper process that megatron-core would spawn for its results queue.

    The helper would import the main program again, which takes seconds of the first save. It would also outlive a
    killed rank (filesystem_async.py:51). Only a save in another process needs it, and this save is synchronous.
    """
    if getattr(filesystem_async, "_results_queue", None) is None:
        filesystem_async._results_queue = queue.Queue()


def save_with_megatron(
    state: dict[str, Any], directory: Path, config: CheckpointConfig, content_metadata: dict[str, Any]
) -> None:
    """Saves as megatron-core does. Collective over: the default group, which must be the training world.

    Args:
        state: Megatron's sharded state dict.
        directory: Existing, empty directory, the same on every rank.
        config: Megatron's flags for a save.
        content_metadata: How the state dict was made, for the loader.
    """
    _keep_results_in_process()
    strategy: Any = TorchDistSaveShardedStrategy(*FORMAT)
    if config.fully_parallel_save:
        strategy = FullyParallelSaveStrategyWrapper(
            strategy, parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
    dist_checkpointing.save(
        state,
        str(directory),
        sharded_strategy=strategy,
        validate_access_integrity=config.validate_access_integrity,
        content_metadata=dict(content_metadata),
    )
