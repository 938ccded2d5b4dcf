"""Meters ms-swift's trainer in stock jobs and in ours. It is the last plugin of ``--external_plugins``.

It is alone in its folder, because ms-swift puts that folder first on the import path.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from swift.megatron.pipelines.export.export import MegatronExport
from swift.megatron.pipelines.train import sft
from swift.megatron.trainers.base import BaseMegatronTrainer
from swift.megatron.trainers.rollout_mixin import MegatronRolloutMixin
from swift.megatron.utils import megatron_lm_utils

from benchmarks.host_meter import FOLDER, take_turns, watch
from benchmarks.swift_jobs import (
    BUILD,
    EXPORT,
    FIRST_STEPS,
    GENERATE,
    ON_CPU,
    PLOT,
    RECORD,
    SAVE,
    SETUP,
    SHARDS,
    STEP,
    SYNC,
    TRAINED,
)
from benchmarks.taken import Taken
from rl_safe_workers.platforms.nvml_memory import process_memory

found: dict[str, Any] = {"taken": {}, "by_group": {}, "steps": 0}


@functools.cache
def taken() -> Taken:
    """Returns the meter of this process's own memory."""
    if ON_CPU:
        return Taken(torch.device("cpu"))
    device = torch.device("cuda", torch.cuda.current_device())
    if process_memory(device) is None:
        raise RuntimeError("NVML does not tell the memory of this process, and other jobs share its GPU")
    return Taken(device)


def attribute(method: str, window: str) -> None:
    """Counts the memory that collectives take in calls of a trainer's method, only in the first steps."""
    stock = getattr(BaseMegatronTrainer, method)

    @functools.wraps(stock)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if found["steps"] >= FIRST_STEPS:
            return stock(*args, **kwargs)
        meter = taken()
        before, groups = meter.by_collectives, dict(meter.by_group)
        with meter.attributed():
            result = stock(*args, **kwargs)
        sums, new = found["taken"], found["by_group"].setdefault(window, {})
        sums[window] = sums.get(window, 0) + meter.by_collectives - before
        for name, size in meter.by_group.items():
            if size > groups.get(name, 0):
                new[name] = new.get(name, 0) + size - groups.get(name, 0)
        found["steps"] += window == STEP
        write()
        return result

    setattr(BaseMegatronTrainer, method, counted)


def write() -> None:
    """Writes the measured figures, with our bootstrap's own ledger if there is one."""
    install = sys.modules.get("rl_safe_workers.adapters.swift.install")
    job = None if install is None else install.job()
    if job is not None and job.has_world and (report := job.trainer.comms.report) is not None:
        found["ledger"] = [asdict(entry) for entry in report.entries]
        found["bootstrap"] = {"bytes": report.bytes, "predicted_bytes": report.predicted_bytes}
        found["kernel_bytes"], found["given_bytes"] = report.kernel_bytes, job.given_bytes
    path = Path(os.environ[FOLDER]) / f"{RECORD}{os.environ['RANK']}.json"
    path.write_text(json.dumps(found), encoding="utf-8")


if multiprocessing.parent_process() is None:  # no worker of a data loader
    for own_method, own_window in (("__init__", BUILD), ("setup_model_training", SETUP), ("train_step", STEP)):
        attribute(own_method, own_window)
    for own_method, own_name in (
        ("__init__", BUILD),
        ("setup_model_training", SETUP),
        ("train_step", STEP),
        ("save_checkpoint", SAVE),
        ("finalize_training", TRAINED),
    ):
        watch(BaseMegatronTrainer, own_method, own_name)
    watch(MegatronRolloutMixin, "_generate_completions", GENERATE)
    watch(MegatronRolloutMixin, "_move_model_to_vllm", SYNC)
    take_turns(BaseMegatronTrainer, "train_step")
    watch(megatron_lm_utils, "_generate_state_dict", SHARDS)
    watch(sft, "plot_images", PLOT)
    watch(MegatronExport, "run", EXPORT)
