"""Names what is metered in a job of verl: loaded by ``VERL_USE_EXTERNAL_MODULES`` in stock runs and in ours."""

from __future__ import annotations

from types import ModuleType

from wrapt import when_imported

from benchmarks.host_meter import take_turns, watch

CALLS = (
    "init_model",
    "compute_log_prob",
    "update_actor",
    "update_weights",
    "save_checkpoint",
    "load_checkpoint",
)
"""Methods of verl's actor worker."""


@when_imported("verl.workers.engine_workers")  # type: ignore[untyped-decorator]
def _watch_workers(module: ModuleType) -> None:
    for name in CALLS:
        watch(module.ActorRolloutRefWorker, name, name)


@when_imported("verl.trainer.ppo.v1.trainer_sync")  # type: ignore[untyped-decorator]
def _alternate_steps(module: ModuleType) -> None:
    take_turns(module.PPOTrainerSync, "on_step_begin", "on_step_end")
