"""Spares ranks the helper process of megatron-core's own saves."""

from __future__ import annotations

import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async


def keep_results_in_process() -> None:
    """Called before a save that is not in the background: its helper would import all of Megatron for seconds."""
    filesystem_async._results_queue = queue.Queue()
