"""Phases of ms-swift's loop, by its own callbacks."""

from __future__ import annotations

from typing import Any

from rl_safe_workers.adapters.swift.job import SwiftJob
from rl_safe_workers.lifecycle import Phase


def safe_flow(host: type[Any], job: SwiftJob) -> type[Any]:
    """Returns ms-swift's ``default_flow`` callback, which every job has, with the phases ``train`` and ``logprob``.

    Args:
        host: What ``megatron_callbacks_map`` holds.
        job: This rank's.
    """

    class SafeFlowCallback(host):
        """Enters a phase where a step or an evaluation begins."""

        def on_step_begin(self) -> None:
            """Begins a step once every rank has come, and names who has not."""
            super().on_step_begin()
            job.begin(Phase.TRAIN)

        def on_step_end(self) -> None:
            """Ends the step."""
            job.finish_phase()
            job.trainer.memory.step()
            super().on_step_end()

        def on_eval_begin(self) -> None:
            """Begins an evaluation, which is forward passes alone, likewise."""
            super().on_eval_begin()
            job.begin(Phase.LOGPROB)

        def on_eval_end(self) -> None:
            """Ends the evaluation."""
            job.finish_phase()
            super().on_eval_end()

    return SafeFlowCallback
