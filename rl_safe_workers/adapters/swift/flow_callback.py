"""Enters and leaves phases in ms-swift's training loop, by ms-swift's own callbacks."""

from __future__ import annotations

from typing import Any

from rl_safe_workers.adapters.swift.job import SwiftJob
from rl_safe_workers.lifecycle import Phase


def safe_flow(host: type[Any], job: SwiftJob) -> type[Any]:
    """Returns a subclass of the ``default_flow`` callback, which every job has, with phases ``train`` and ``logprob``.

    Args:
        host: ms-swift's callback class, from ``megatron_callbacks_map``.
        job: The job of this rank.
    """

    class SafeFlowCallback(host):
        """Enters a phase when a step or an evaluation begins, and leaves it at the end."""

        def on_step_begin(self) -> None:
            """Begins a step as phase ``train``. Collective over: the training world.

            Raises:
                PhaseTimeoutError: If a rank does not come in time; names it.
            """
            super().on_step_begin()
            job.begin(Phase.TRAIN)

        def on_step_end(self) -> None:
            """Ends the step."""
            job.finish_phase()
            job.trainer.memory.step()
            super().on_step_end()

        def on_eval_begin(self) -> None:
            """Begins an evaluation as phase ``logprob``, because it has only forward passes; see `on_step_begin`."""
            super().on_eval_begin()
            job.begin(Phase.LOGPROB)

        def on_eval_end(self) -> None:
            """Ends the evaluation."""
            job.finish_phase()
            super().on_eval_end()

    return SafeFlowCallback
