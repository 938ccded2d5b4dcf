"""Writes down what a rank does, with and without our plugin: a plugin for --external_plugins, after ours."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from swift.megatron.pipelines.export import export
from swift.megatron.trainers import base

from rl_safe_workers.comms.live_groups import live_groups
from rl_safe_workers.comms.releasable import GroupState
from rl_safe_workers.comms.release import releasable_groups
from rl_safe_workers.comms.trace import op_class
from tests.distributed.recording import recorded_collectives
from tests.swift import engine_double

found: dict[str, Any] = {"saves": [], "issued": [], "released": {"generation": [], "step": []}}
phases: Counter[str] = Counter()


def watched_save(save: Any) -> Any:
    def save_mcore_checkpoint(*args: Any, **kwargs: Any) -> Any:
        started_s = time.monotonic()
        with recorded_collectives() as collectives:
            try:
                return save(*args, **kwargs)
            finally:
                world = tuple(range(dist.get_world_size()))
                on_world = [c.op for c in collectives if c.group == dist.group.WORLD.group_desc and c.ranks == world]
                seconds = time.monotonic() - started_s
                found["saves"].append({"world": len(on_world), "all": len(collectives), "seconds": seconds})

    return save_mcore_checkpoint


def watched_step(step: Any) -> Any:
    def train_step(*args: Any, **kwargs: Any) -> Any:
        with recorded_collectives() as collectives:
            result = step(*args, **kwargs)
        found["connected"] = connected()
        found["released"]["step"].append(is_released())
        found["issued"] += [[c.group, list(c.ranks), op_class(c.op)] for c in collectives]
        return result

    return train_step


def connected() -> list[str]:
    """The connections that the bootstrap has made, in the form in which a step's collectives are recorded."""
    install = sys.modules.get("rl_safe_workers.adapters.swift.install")
    job = None if install is None else install.job()
    if job is None:
        return []
    classes = job.trainer.comms._connected
    return sorted(
        json.dumps([group.group.group_desc, list(group.ranks), one])
        for group in live_groups()
        for one in classes.get(group.group.group_name, ())
    )


def is_released() -> bool:
    """True if communicators have given their memory away."""
    return any(group.state is not GroupState.CONNECTED for group in releasable_groups())


def watched_generation(infer: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        found["released"]["generation"].append(is_released())
        return infer(*args, **kwargs)

    return call


def watched_end(finalize: Any) -> Any:
    def finalize_training(*args: Any, **kwargs: Any) -> Any:
        finalize(*args, **kwargs)
        found["trained"] = time.time()
        write()  # an actor of Ray's is killed at its end

    return finalize_training


def write() -> None:
    issued = sorted({json.dumps(one) for one in found["issued"]})
    install = sys.modules.get("rl_safe_workers.adapters.swift.install")
    job = None if install is None else install.job()
    if job is not None and job.has_world:
        trainer = job.trainer
        phases.update(str(event.phase) for event in trainer.lifecycle.drain_events() if event.ok)
        found["phases"] = phases
        report = trainer.comms.report
        if report is not None:
            found["bootstrap"] = len(report.entries)
            found["unknown"] = list(report.unknown)
    folder = Path(os.environ.get("RECORDS", "."))
    (folder / f"record{os.environ['RANK']}.json").write_text(json.dumps({**found, "issued": issued}))


for module in (base, export):
    module.save_mcore_checkpoint = watched_save(module.save_mcore_checkpoint)
base.BaseMegatronTrainer.train_step = watched_step(base.BaseMegatronTrainer.train_step)
base.BaseMegatronTrainer.finalize_training = watched_end(base.BaseMegatronTrainer.finalize_training)
engine_double.ColocatedEngine.infer = watched_generation(engine_double.ColocatedEngine.infer)
if "RANK" in os.environ:
    atexit.register(write)
