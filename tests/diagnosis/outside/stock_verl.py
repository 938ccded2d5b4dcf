"""Puts the places for a fault into stock verl: for ``VERL_USE_EXTERNAL_MODULES``, after the shims for a CPU.

Its rollout engines are those of `tests.verl.echo_rollout`, which have places of their own.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
from wrapt import when_imported

from tests.diagnosis.misdeeds import VARIABLE, here

PHASES = {
    "init_model": "bootstrap",
    "load_checkpoint": "load",
    "update_weights": "sync",
    "compute_log_prob": "logprob",
    "update_actor": "train",
    "save_checkpoint": "save",
}
"""Phases by the method of verl's actor worker."""


@when_imported("verl.workers.engine_workers")  # type: ignore[untyped-decorator]
def _change(module: ModuleType) -> None:
    for name, phase in PHASES.items():
        _before(module.ActorRolloutRefWorker, name, phase)


def _before(owner: Any, name: str, phase: str) -> None:
    stock = getattr(owner, name)

    def strike() -> None:
        rank = int(os.environ["RANK"])
        if phase == "bootstrap":
            _note(rank)
        here("trainer", rank, phase)

    if inspect.iscoroutinefunction(inspect.unwrap(stock)):

        @functools.wraps(stock)
        async def call(*args: Any, **kwargs: Any) -> Any:
            strike()
            return await stock(*args, **kwargs)
    else:

        @functools.wraps(stock)
        def call(*args: Any, **kwargs: Any) -> Any:
            strike()
            return stock(*args, **kwargs)

    setattr(owner, name, call)


def _note(rank: int) -> None:
    """Leaves where the job is, for who looks at it."""
    if fault := json.loads(os.environ.get(VARIABLE) or "{}"):
        folder = Path(fault["folder"])
        (folder / f"pid_trainer_{rank}").write_text(str(os.getpid()))
        (folder / "address").write_text(ray.get_runtime_context().gcs_address)
